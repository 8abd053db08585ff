// Groups that are used without an order (experts): what the cache keeps, and what it leaves to the others.
#include "core/by_use.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "core/engine.h"
#include "random.h"
#include "sim/virtual_backend.h"

namespace dynswap::test {

namespace {

constexpr std::size_t kMiB = 1u << 20;
constexpr std::size_t kSize = 8 * kMiB;

/// `layers` dense weights, each followed by `experts` of the same size, of which some are used.
struct Mixture {
  Mixture(std::size_t layers, std::size_t experts, std::size_t budget, std::uint32_t prefetch = 2) {
    EngineOptions options;
    options.budget = budget;
    options.prefetch = prefetch;
    auto backend = std::make_unique<sim::VirtualBackend>(1e9, 0);
    clock = backend.get();
    engine = std::make_shared<Engine>(std::move(backend), options);
    std::uint64_t unit = 0;
    for (std::size_t layer = 0; layer < layers; ++layer) {
      dense.push_back(engine->add_weight(weight("dense"), unit++));
      auto& chosen_from = of_layer.emplace_back();
      for (std::size_t i = 0; i < experts; ++i)
        chosen_from.push_back(engine->add_weight(weight("expert"), unit++, {.by_use = true}));
    }
    engine->plan();
  }

  static SourcePtr weight(const std::string& name) {
    auto source = std::make_shared<Source>();
    source->name = name;
    source->count = kSize;
    return source;
  }

  void use(WeightId id) {
    const Lease lease = engine->acquire(id, 0);
    clock->kernel(1);
  }

  /// Each layer uses two experts of those that `choose` draws.
  template <class Choose>
  void pass(const Choose& choose) {
    for (std::size_t layer = 0; layer < dense.size(); ++layer) {
      use(dense[layer]);
      for (int i = 0; i < 2; ++i) use(of_layer[layer][choose()]);
    }
  }

  Stats stats() const { return engine->stats(); }

  sim::VirtualBackend* clock = nullptr;
  std::shared_ptr<Engine> engine;
  std::vector<WeightId> dense;
  std::vector<std::vector<WeightId>> of_layer;
};

}  // namespace

TEST(by_use_is_no_part_of_the_order) {
  Mixture model(4, 16, 0);
  Random random(1);
  const auto any = [&] { return random.below(16); };
  for (int i = 0; i < 3; ++i) model.pass(any);
  model.engine->reset_counters();
  for (int i = 0; i < 10; ++i) model.pass(any);
  // The dense weights are all fetched ahead, whatever is chosen; nothing that is not used is fetched.
  const Stats stats = model.stats();
  EXPECT_EQ(stats.prefetches, 40u);
  EXPECT_EQ(stats.wasted_prefetches, 0u);
  EXPECT_EQ(stats.copies, stats.prefetches + stats.misses);
  EXPECT(stats.misses <= 80u);
  EXPECT_EQ(stats.peak_bytes, (3 + 3) * kSize);
}

TEST(by_use_leaves_the_dense_weights_on_the_device) {
  // Room for all dense weights and half of the experts: of these, half are there.
  Mixture model(4, 16, (4 + 32) * kSize);
  Random random(1);
  const auto any = [&] { return random.below(16); };
  for (int i = 0; i < 50; ++i) model.pass(any);
  model.engine->reset_counters();
  for (int i = 0; i < 100; ++i) model.pass(any);
  const Stats stats = model.stats();
  EXPECT_EQ(stats.resident_bytes, 4 * kSize);
  EXPECT_EQ(stats.arena_bytes, 32 * kSize);
  EXPECT(stats.copies > 300u && stats.copies < 460u);  // of 800
}

TEST(by_use_keeps_what_is_used_most) {
  // Two experts of each layer are chosen nine times out of ten, and there is room for three.
  Mixture model(4, 16, (4 + 12) * kSize);
  Random random(1);
  const auto skewed = [&] { return random.chance(0.9) ? random.below(2) : 2 + random.below(14); };
  for (int i = 0; i < 50; ++i) model.pass(skewed);
  model.engine->reset_counters();
  for (int i = 0; i < 100; ++i) model.pass(skewed);
  EXPECT(model.stats().copies < 100u);  // of 800, of which 80 are of others
}

TEST(by_use_follows_a_change_of_what_is_used) {
  Mixture model(1, 8, (1 + 2) * kSize);
  for (int i = 0; i < 1000; ++i) model.use(model.of_layer[0][i % 2]);
  for (int i = 0; i < 20000; ++i) model.use(model.of_layer[0][4 + i % 2]);
  model.engine->reset_counters();
  for (int i = 0; i < 100; ++i) model.use(model.of_layer[0][4 + i % 2]);
  EXPECT_EQ(model.stats().copies, 0u);
}

TEST(by_use_a_fixed_order_is_fetched_ahead_and_what_fits_stays) {
  // All experts of each layer, as for a long prompt; there is room for a quarter of them.
  Mixture model(4, 16, (4 + 16) * kSize);
  const auto pass = [&] {
    for (std::size_t layer = 0; layer < 4; ++layer) {
      model.use(model.dense[layer]);
      for (const WeightId expert : model.of_layer[layer]) model.use(expert);
    }
  };
  for (int i = 0; i < 4; ++i) pass();
  const double begin = model.clock->seconds();
  model.engine->reset_counters();
  for (int i = 0; i < 5; ++i) pass();
  const Stats stats = model.stats();
  EXPECT_EQ(stats.misses, 0u);
  EXPECT(stats.copies <= 5 * (64 - 16 + 3));  // those ahead and the one in use take part of the room
  EXPECT(model.clock->seconds() - begin <= 5 * 68 + 1e-6);  // the kernels' time: no copy is waited for
  EXPECT_EQ(stats.overflow_bytes, 0u);
}

TEST(by_use_a_fixed_order_is_learned_in_both_directions) {
  Mixture model(1, 16, (1 + 4) * kSize);
  const auto pass = [&] {
    for (int i = 0; i < 16; ++i) model.use(model.of_layer[0][i]);
    for (int i = 15; i >= 0; --i) model.use(model.of_layer[0][i]);
  };
  for (int i = 0; i < 4; ++i) pass();
  model.engine->reset_counters();
  for (int i = 0; i < 5; ++i) pass();
  EXPECT_EQ(model.stats().misses, 0u);
}

TEST(by_use_nothing_is_fetched_ahead_in_a_random_order) {
  Mixture model(4, 16, (4 + 16) * kSize);
  Random random(1);
  const auto any = [&] { return random.below(16); };
  for (int i = 0; i < 100; ++i) model.pass(any);
  model.engine->reset_counters();
  for (int i = 0; i < 100; ++i) model.pass(any);
  EXPECT(model.stats().prefetches < 8u);  // of 800 uses
}

TEST(by_use_expected_copies_are_issued_together) {
  Mixture model(1, 16, (1 + 4) * kSize);
  const std::vector<WeightId>& experts = model.of_layer[0];
  model.engine->expect({experts[3], experts[5], experts[7], experts[9], experts[11]});
  EXPECT_EQ(model.stats().prefetches, 4u);  // as many as there is room for
  for (const int i : {3, 5, 7, 9}) model.use(experts[i]);
  EXPECT_EQ(model.stats().misses, 0u);
  EXPECT_EQ(model.stats().hits, 4u);
  model.use(experts[11]);
  EXPECT_EQ(model.stats().misses, 1u);
}

TEST(by_use_held_slices_overflow_and_are_counted) {
  Mixture model(1, 8, 2 * kSize, 0);
  const Lease first = model.engine->acquire(model.of_layer[0][0], 0);
  {
    const Lease second = model.engine->acquire(model.of_layer[0][1], 0);
    EXPECT(second.overflows());
    EXPECT_EQ(model.stats().overflow_bytes, kSize);
  }
  EXPECT_EQ(model.stats().peak_bytes, 3 * kSize);
}

TEST(by_use_any_budget_that_holds_one_of_each_works) {
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    Random random(seed);
    const std::size_t count = random.between(1, 40);
    Groups groups(count);
    std::size_t largest_of[2] = {0, 0}, total = 0;
    for (GroupTraits& group : groups) {
      group = {.bytes = random.between(1, 3000)};
      group.by_use = random.chance(0.6);
      group.tiny = random.chance(0.1);
      largest_of[group.by_use] = std::max(largest_of[group.by_use], group.bytes);
      total += group.bytes;
    }
    const std::size_t smallest = largest_of[0] + largest_of[1];
    const auto prefetch = static_cast<std::uint32_t>(random.below(5));
    const std::size_t budget = random.chance(0.2) ? smallest : random.between(smallest, 2 * total);
    const ResidencyPlan plan = plan_residency(groups, budget, prefetch);
    EXPECT(plan.resident_bytes + plan.arena_bytes + plan.cache_bytes <= budget);
    EXPECT(plan.cache_bytes >= largest_of[1]);
    for (std::size_t i = 0; i < count; ++i) EXPECT(!groups[i].by_use || !plan.resident[i]);
    EXPECT_THROWS(plan_residency(groups, smallest - 1, prefetch), BudgetError);
  }
}

}  // namespace dynswap::test
