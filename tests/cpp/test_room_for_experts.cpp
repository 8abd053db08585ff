// The budget's division between experts and other weights by time: against the engine's own, on its clock.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "core/engine.h"
#include "random.h"
#include "sim/placement.h"
#include "sim/virtual_backend.h"

namespace dynswap::test {

namespace {

constexpr std::size_t kMiB = 1u << 20;
constexpr double kBus = 1e9;
constexpr std::uint32_t kPrefetch = 2;

/// Layers of a dense weight and experts, of which a router chooses some at random.
struct Shape {
  std::size_t layers = 8, experts = 16, active = 2;
  std::size_t dense_bytes = 8 * kMiB, expert_bytes = 8 * kMiB;
  double dense_seconds = 0.001, expert_seconds = 0.001;

  std::size_t groups() const { return layers * (1 + experts); }
  bool by_use(std::size_t group) const { return group % (1 + experts) != 0; }
  std::size_t bytes(std::size_t group) const { return by_use(group) ? expert_bytes : dense_bytes; }
  std::size_t dense_total() const { return layers * dense_bytes; }
  std::size_t expert_total() const { return layers * experts * expert_bytes; }

  /// Calls `use` for each group of a pass.
  template <class Use>
  void pass(Random& random, const Use& use) const {
    for (std::size_t layer = 0; layer < layers; ++layer) {
      const std::size_t dense = layer * (1 + experts);
      use(dense, dense_seconds);
      std::vector<std::size_t> chosen;
      while (chosen.size() < active) {
        const std::size_t expert = dense + 1 + random.below(experts);
        if (std::find(chosen.begin(), chosen.end(), expert) == chosen.end()) chosen.push_back(expert);
      }
      for (const std::size_t expert : chosen) use(expert, expert_seconds);
    }
  }

  /// As two passes were recorded.
  sim::AccessPattern observed() const {
    sim::AccessPattern pattern;
    pattern.bytes_per_second = kBus;
    for (std::size_t group = 0; group < groups(); ++group)
      pattern.groups.push_back({.bytes = bytes(group), .by_use = by_use(group)});
    Random random(77);
    for (int i = 0; i < 2; ++i) {
      pass(random, [&](std::size_t group, double seconds) {
        pattern.steps.push_back({static_cast<std::uint32_t>(group), seconds, true});
      });
    }
    return pattern;
  }

  sim::Placement placed(std::size_t budget) const {
    return sim::place_by_time(observed(), budget, kPrefetch);
  }

  /// Seconds of a pass with the engine's own plan, or with this one.
  double seconds(std::size_t budget, const std::optional<sim::Placement>& placement = {}) const {
    EngineOptions options;
    options.budget = budget;
    options.prefetch = kPrefetch;
    options.group_bytes = 1;
    if (placement) {
      PriorPlan& plan = options.prior.emplace();
      plan.group_of.resize(groups());
      std::iota(plan.group_of.begin(), plan.group_of.end(), 0u);
      plan.resident = placement->resident;
      plan.cache_bytes = placement->cache_bytes;
    }
    auto backend = std::make_unique<sim::VirtualBackend>(kBus, 0);
    const sim::VirtualBackend& clock = *backend;
    sim::VirtualBackend& kernels = *backend;
    const auto engine = std::make_shared<Engine>(std::move(backend), options);
    for (std::size_t group = 0; group < groups(); ++group) {
      auto source = std::make_shared<Source>();
      source->count = bytes(group);
      engine->add_weight(std::move(source), group, {.by_use = by_use(group)});
    }
    engine->plan();
    Random random(1);
    const auto run = [&](int passes) {
      for (int i = 0; i < passes; ++i) {
        pass(random, [&](std::size_t group, double compute) {
          const Lease lease = engine->acquire(static_cast<WeightId>(group), 0);
          kernels.kernel(compute);
        });
      }
    };
    run(30);
    const double begin = clock.seconds();
    run(60);
    EXPECT(engine->stats().peak_bytes <= budget);
    EXPECT_EQ(engine->stats().overflow_bytes, 0u);
    return (clock.seconds() - begin) / 60;
  }
};

}  // namespace

// The dense weights' copies hide behind their compute: their room is worth more to experts.
TEST(room_for_experts_is_that_of_weights_whose_copies_hide) {
  Shape shape;
  shape.dense_bytes = 32 * kMiB;
  shape.dense_seconds = 0.08;
  const std::size_t budget = shape.dense_total() + 4 * shape.expert_bytes;
  const sim::Placement placed = shape.placed(budget);
  const double by_time = shape.seconds(budget, placed), evenly = shape.seconds(budget);
  std::printf("hidden: %.3f of the time with dense weights first; foreseen %.3f of what it takes\n",
              by_time / evenly, placed.seconds / 2 / by_time);
  EXPECT(placed.cache_bytes > 8 * shape.expert_bytes);
  EXPECT(by_time < 0.98 * evenly);
}

// The bus cannot keep up: each dense weight is needed in each pass, an expert now and then.
TEST(room_for_experts_comes_after_weights_that_are_waited_for) {
  Shape shape;
  const std::size_t budget = shape.dense_total() + 16 * shape.expert_bytes;
  const sim::Placement placed = shape.placed(budget);
  for (std::size_t group = 0; group < shape.groups(); ++group)
    EXPECT_EQ(placed.resident[group], !shape.by_use(group));
  EXPECT_EQ(placed.cache_bytes, 16 * shape.expert_bytes);
}

TEST(room_for_experts_by_time_is_not_behind_the_plan_without) {
  double worst = 0, mean = 0;
  constexpr int kCases = 24;
  for (int seed = 1; seed <= kCases; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    Shape shape;
    shape.layers = random.between(3, 8);
    shape.experts = random.between(4, 24);
    shape.dense_bytes = random.between(1, 48) * kMiB;
    shape.expert_bytes = random.between(1, 12) * kMiB;
    shape.dense_seconds = 0.002 * static_cast<double>(random.below(30));
    shape.expert_seconds = 0.001 * static_cast<double>(random.below(10));
    const std::size_t total = shape.dense_total() + shape.expert_total();
    const std::size_t budget =
        std::max(3 * (shape.dense_bytes + shape.expert_bytes), total * random.between(10, 80) / 100);
    const double ratio = shape.seconds(budget, shape.placed(budget)) / shape.seconds(budget);
    worst = std::max(worst, ratio);
    mean += ratio / kCases;
  }
  std::printf("by time / without: %.3f on average, %.3f at worst\n", mean, worst);
  EXPECT(mean < 1);
  EXPECT(worst < 1.05);
}

}  // namespace dynswap::test
