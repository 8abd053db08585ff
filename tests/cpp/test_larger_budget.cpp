// A larger budget never streams more, and is never slower, but for one group (Note [A larger budget never
// streams more]): random models, and experts with random routes, on the virtual clock.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "random.h"
#include "shapes.h"

namespace dynswap::test {

namespace {

constexpr double kBus = 10e9;  // bytes a second
constexpr double kLatency = 7e-6;
constexpr auto kOverhead = static_cast<double>(kAcceleratorTraits.copy_overhead_bytes);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kModels = 10;  // what they look for does not depend on the plan
#else
constexpr std::uint64_t kModels = 250;
#endif
constexpr std::size_t kBudgets = 12;

/// Modules in the order of use: equal ones, layers of unequal ones, any, or some far larger than the others.
class RandomModel {
 public:
  explicit RandomModel(Random& random) : random_(random), base_(std::size_t{1} << random.between(16, 22)) {
    const std::size_t modules = random.between(8, 80);
    const std::size_t kind = random.below(4);
    std::vector<std::size_t> layer(random.between(3, 8));
    for (std::size_t& bytes : layer) bytes = base_ * random.between(1, 16) / (random.chance(0.3) ? 64 : 4);
    for (std::size_t i = 0; i < modules; ++i) {
      if (kind == 0) add({base_});
      if (kind == 1) add({layer[i % layer.size()]});
      if (kind == 2) add({random.between(base_ / 8, 2 * base_), random.between(base_ / 8, 2 * base_)});
      if (kind == 3) add({i == 0 || i + 1 == modules ? 12 * base_ : base_ * random.between(1, 4) / 2});
      if (kind == 0 && modules < 24 && i % 4 == 3) add_experts(random.chance(0.5) ? 0.25 : 0.5);
    }
  }

  sim::Workload workload;

  std::size_t bytes() const {
    std::size_t total = 0;
    for (const sim::Layer& layer : workload.layers) total += layer.bytes;
    return total;
  }
  bool has_experts() const { return experts_; }

 private:
  void add(const std::vector<std::size_t>& weights, double by_use = 0) {
    for (const std::size_t bytes : weights) {
      sim::Layer& layer = workload.layers.emplace_back();
      layer.name = "weight" + std::to_string(workload.layers.size());
      layer.bytes = bytes;
      layer.compute_seconds = balance_ * static_cast<double>(bytes) / kBus;
      layer.unit = unit_;
      layer.by_use = by_use;
    }
    ++unit_;
  }
  void add_experts(double used) {
    for (int i = 0; i < 8; ++i) add({base_, base_ / 2}, used);
    experts_ = true;
  }

  Random& random_;
  const std::size_t base_;
  const double balance_ = 0.1 + 0.3 * static_cast<double>(random_.below(6));  // compute : copy
  std::uint64_t unit_ = 0;
  bool experts_ = false;
};

struct At {
  std::size_t budget = 0;
  sim::Result result;
};

/// From the smallest budget that works to all of the model.
std::vector<At> by_budget(Random& random, const RandomModel& model, std::uint32_t prefetch) {
  EngineOptions options;
  options.prefetch = prefetch;
  const std::size_t smallest = sim::largest_group(model.workload).bytes;
  std::vector<std::size_t> budgets{smallest};
  while (budgets.size() < kBudgets) {
    const double share = std::pow(static_cast<double>(random.between(1, 1000)) / 1000, 1.5);
    budgets.push_back(std::max(
        smallest, static_cast<std::size_t>((0.02 + 0.98 * share) * static_cast<double>(model.bytes()))));
  }
  std::sort(budgets.begin(), budgets.end());
  std::vector<At> all;
  for (const std::size_t budget : budgets) {
    options.budget = budget;
    all.push_back({budget, sim::simulate(model.workload, options, kBus, kLatency,
                                         /*passes=*/model.has_experts() ? 60 : 8)});
  }
  return all;
}

}  // namespace

TEST(larger_budget_never_streams_more_but_one_group) {
  for (std::uint64_t seed = 1; seed <= kModels; ++seed) {
    Random random(seed);
    const RandomModel model(random);
    const auto prefetch = static_cast<std::uint32_t>(random.between(1, 4));
    const std::vector<At> all = by_budget(random, model, prefetch);
    for (std::size_t more = 1; more < all.size(); ++more) {
      for (std::size_t less = 0; less < more; ++less) {
        const sim::Result &smaller = all[less].result, &larger = all[more].result;
        const auto slot = static_cast<double>(std::max(smaller.slot_bytes, larger.slot_bytes));
        const auto grown =
            static_cast<double>(larger.streamed_bytes) - static_cast<double>(smaller.streamed_bytes);
        // Fewer and larger copies may be of so many more bytes.
        const double saved = kOverhead * (static_cast<double>(smaller.streamed_groups) -
                                          static_cast<double>(larger.streamed_groups));
        if (grown > slot + std::max(saved, 0.0)) {
          std::printf("seed %llu, prefetch %u: %zu bytes stream %.0f more than %zu, slot %.0f\n",
                      static_cast<unsigned long long>(seed), prefetch, all[more].budget, grown,
                      all[less].budget, slot);
        }
        EXPECT(grown <= slot + std::max(saved, 0.0));
      }
    }
  }
}

// Less may be moved than is streamed, by what is left in the ring from one pass to the next: a ring at most.
// Residents are spread by bytes, which may leave a module with much to compute where nothing is to be copied:
// 1 of these models is slower by more than a ring.
TEST(larger_budget_is_never_slower_where_the_ring_is_full) {
  constexpr std::uint32_t kPrefetch = 2;
  constexpr double kSlots = kPrefetch + 1, kSlowest = 1.5 * kSlots;
  double worst_bytes = 0, worst_time = 0;
  for (std::uint64_t seed = 1; seed <= kModels; ++seed) {
    Random random(1000 + seed);
    const RandomModel model(random);
    const std::vector<At> all = by_budget(random, model, kPrefetch);
    for (std::size_t more = 1; more < all.size(); ++more) {
      for (std::size_t less = 0; less < more; ++less) {
        const sim::Result &smaller = all[less].result, &larger = all[more].result;
        if (smaller.depth < kPrefetch) continue;
        EXPECT_EQ(larger.depth, std::uint64_t{kPrefetch});
        const auto slot = static_cast<double>(std::max(smaller.slot_bytes, larger.slot_bytes));
        if (slot == 0) continue;
        const double bytes = (larger.moved_bytes - smaller.moved_bytes) / slot;
        const double time = (larger.seconds - smaller.seconds) / (slot / kBus + kLatency);
        worst_bytes = std::max(worst_bytes, bytes);
        worst_time = std::max(worst_time, time);
        if (bytes > kSlots || time > kSlowest) {
          std::printf("seed %llu: %zu bytes against %zu: %.2f slots more moved, %.2f slots slower\n",
                      static_cast<unsigned long long>(seed), all[more].budget, all[less].budget, bytes, time);
        }
        EXPECT(bytes <= kSlots);
        EXPECT(time <= kSlowest);
      }
    }
  }
  std::printf("at worst %.2f slots more moved, %.2f slots slower\n", worst_bytes, worst_time);
}

}  // namespace dynswap::test
