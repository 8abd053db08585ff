// The engine in small programs, on the virtual clock (nothing is read or written there) and the fake device.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "core/engine.h"
#include "fake_device.h"
#include "sim/virtual_backend.h"

namespace dynswap::test {

namespace {

constexpr std::size_t kMiB = 1u << 20;
constexpr double kBus = 1e9;

SourcePtr make_source(std::size_t bytes, const std::string& name = "w") {
  auto source = std::make_shared<Source>();
  source->name = name;
  source->count = bytes;
  return source;
}

/// An engine with one weight a unit, of these sizes, on the virtual clock.
struct Model {
  Model(const std::vector<std::size_t>& sizes, EngineOptions options, double latency = 0) {
    auto backend = std::make_unique<sim::VirtualBackend>(kBus, latency);
    clock = backend.get();
    engine = std::make_shared<Engine>(std::move(backend), options,
                                      [this](const std::string& text) { warnings.push_back(text); });
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      weights.push_back(engine->add_weight(make_source(sizes[i], "layer " + std::to_string(i)), i));
    }
    engine->plan();
  }

  void use(std::size_t index, double seconds = 1) {
    const Lease lease = engine->acquire(weights[index], 0);
    clock->kernel(seconds);
  }
  void pass(double seconds = 1) {
    for (std::size_t i = 0; i < weights.size(); ++i) use(i, seconds);
  }
  Stats stats() const { return engine->stats(); }

  sim::VirtualBackend* clock = nullptr;
  std::shared_ptr<Engine> engine;
  std::vector<WeightId> weights;
  std::vector<std::string> warnings;
};

EngineOptions with_budget(std::size_t budget, std::uint32_t prefetch = 2) {
  EngineOptions options;
  options.budget = budget;
  options.prefetch = prefetch;
  return options;
}

}  // namespace

TEST(engine_steady_state_has_no_misses_and_moves_each_byte_once) {
  Model model(std::vector<std::size_t>(12, 8 * kMiB), with_budget(0));
  model.pass();
  EXPECT_EQ(model.stats().misses, 1u);  // the very first
  model.engine->reset_counters();
  const std::uint64_t before = model.clock->bytes_copied();
  for (int i = 0; i < 3; ++i) model.pass();
  EXPECT_EQ(model.stats().misses, 0u);  // no bubble between passes either
  EXPECT_EQ(model.stats().hits, 36u);
  EXPECT_EQ(model.stats().wasted_prefetches, 0u);
  EXPECT_EQ(model.clock->bytes_copied() - before, 3 * 12 * 8 * kMiB);
  EXPECT_EQ(model.stats().bytes_moved, 3 * 12 * 8 * kMiB);
}

TEST(engine_backward_on_another_thread_goes_on_in_the_order_of_the_forward_pass) {
  constexpr std::size_t kLayers = 12;
  Model model(std::vector<std::size_t>(kLayers, 8 * kMiB), with_budget(0));
  const std::thread::id forward = std::this_thread::get_id();
  const auto step = [&] {
    model.pass();
    std::thread([&] {
      for (std::size_t i = kLayers; i-- > 0;) {
        const Lease lease = model.engine->acquire(model.weights[i], 0, {.thread = forward});
        model.clock->kernel(1);
      }
    }).join();
  };
  for (int i = 0; i < 3; ++i) step();
  model.engine->reset_counters();
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(model.stats().misses, 0u);
  EXPECT_EQ(model.stats().wasted_prefetches, 0u);
  // At either turn the last layers are still there.
  EXPECT(model.stats().bytes_moved <= 3 * 2 * (kLayers - 1) * 8 * kMiB);
}

TEST(engine_a_probe_changes_no_order) {
  Model model(std::vector<std::size_t>(12, 8 * kMiB), with_budget(0));
  for (int i = 0; i < 2; ++i) model.pass();
  for (const std::size_t index : {7u, 3u, 11u, 0u, 5u}) {
    const Lease probe = model.engine->acquire(model.weights[index], 0, {.in_order = false});
  }
  model.pass();  // what the probes displaced comes back
  model.engine->reset_counters();
  for (int i = 0; i < 2; ++i) model.pass();
  EXPECT_EQ(model.stats().misses, 0u);
  EXPECT_EQ(model.stats().bytes_moved, 2 * 12 * 8 * kMiB);
}

TEST(engine_all_resident_moves_nothing_after_the_first_pass) {
  Model model(std::vector<std::size_t>(6, 8 * kMiB), with_budget(100 * kMiB));
  model.pass();
  EXPECT_EQ(model.clock->copies(), 6u);
  for (int i = 0; i < 3; ++i) model.pass();
  EXPECT_EQ(model.clock->copies(), 6u);
  EXPECT(model.engine->resident(model.weights[3]));
  EXPECT_EQ(model.stats().resident_groups, 6u);
}

// See Note [Tiny weights stay]. A norm that is defined behind the layers it is used before would travel with
// the next ones, and bring them twice a pass.
TEST(engine_tiny_weights_stay_and_are_used_in_any_order) {
  constexpr std::size_t kTiny = 4096;
  std::vector<std::size_t> sizes;
  for (int block = 0; block < 8; ++block) sizes.insert(sizes.end(), {8 * kMiB, 8 * kMiB, kTiny});
  for (const std::size_t budget : {std::size_t{0}, 64 * kMiB}) {
    Model model(sizes, with_budget(budget));
    const auto pass = [&] {
      for (std::size_t block = 0; block < sizes.size(); block += 3) {
        for (const std::size_t index : {block + 2, block, block + 1}) model.use(index);
      }
    };
    for (int i = 0; i < 3; ++i) pass();
    EXPECT(model.engine->resident(model.weights[2]) && model.engine->resident(model.weights[23]));
    std::size_t streamed = 0;
    for (const WeightId weight : model.weights) {
      streamed += model.engine->resident(weight) ? 0 : model.engine->source(weight)->stored_bytes();
    }
    EXPECT(streamed > 0);
    model.engine->reset_counters();
    pass();
    EXPECT_EQ(model.stats().bytes_moved, streamed);
    EXPECT_EQ(model.stats().misses, 0u);
    if (budget > 0) EXPECT(model.stats().arena_bytes + model.stats().resident_bytes <= budget);
  }
}

TEST(engine_the_smallest_budget_has_no_byte_for_tiny_weights) {
  std::vector<std::size_t> sizes;
  for (int block = 0; block < 40; ++block) sizes.insert(sizes.end(), {8 * kMiB, 4096});
  Model model(sizes, with_budget(8 * kMiB));
  for (int i = 0; i < 2; ++i) model.pass();
  EXPECT_EQ(model.stats().arena_bytes + model.stats().resident_bytes, 8 * kMiB);
  EXPECT_EQ(model.stats().overflow_bytes, 0u);
}

TEST(engine_prefetch_zero_fetches_on_demand) {
  Model model(std::vector<std::size_t>(6, 8 * kMiB), with_budget(0, 0));
  for (int i = 0; i < 2; ++i) model.pass();
  EXPECT_EQ(model.stats().misses, 12u);
  EXPECT_EQ(model.stats().prefetches, 0u);
  EXPECT_EQ(model.stats().arena_bytes, 8 * kMiB);
}

TEST(engine_copies_overlap_compute) {
  Model model(std::vector<std::size_t>(10, 8 * kMiB), with_budget(0));
  const double copy = 8 * kMiB / kBus;
  for (int i = 0; i < 3; ++i) model.pass(copy);
  const double begin = model.clock->seconds();
  model.pass(copy);
  const double seconds = model.clock->seconds() - begin;
  EXPECT(seconds < 1.01 * 10 * copy);  // one after the other it would be twice that
  EXPECT(seconds > 0.99 * 10 * copy);
}

TEST(engine_a_skipped_branch_costs_a_copy_and_unlearns_nothing) {
  Model model(std::vector<std::size_t>(12, 8 * kMiB), with_budget(0));
  for (int i = 0; i < 3; ++i) model.pass();
  model.engine->reset_counters();
  for (std::size_t i = 0; i < 12; ++i) {
    if (i != 5) model.use(i);
  }
  EXPECT(model.stats().misses <= 1);
  model.pass();
  model.engine->reset_counters();
  model.pass();
  EXPECT_EQ(model.stats().misses, 0u);
}

TEST(engine_small_weights_travel_together) {
  EngineOptions options = with_budget(0);
  options.group_bytes = 4 * kMiB;
  Model model(std::vector<std::size_t>(64, kMiB), options);
  EXPECT_EQ(model.stats().groups, 16u);
  model.pass();
  EXPECT_EQ(model.clock->copies(), model.stats().copies);
  EXPECT(model.clock->copies() <= 16u + 3u);
}

TEST(engine_what_is_there_is_handed_out_at_once_in_the_group_that_is_in_use) {
  EngineOptions options = with_budget(0);
  options.group_bytes = 4 * kMiB;
  Model model(std::vector<std::size_t>(64, kMiB), options);
  for (int i = 0; i < 3; ++i) model.pass();
  std::size_t at_once = 0;
  for (const bool tries : {false, true}) {
    model.engine->reset_counters();
    for (const WeightId weight : model.weights) {
      Lease lease = tries ? model.engine->acquire_present(weight, 0, /*in_order=*/true) : Lease();
      at_once += lease ? 1 : 0;
      if (!lease) lease = model.engine->acquire(weight, 0);
      model.clock->kernel(1);
    }
    // The order is learned, and the next groups are fetched, all the same.
    EXPECT_EQ(model.stats().hits, 16u);
    EXPECT_EQ(model.stats().misses, 0u);
    EXPECT_EQ(model.stats().copies, 16u);
  }
  EXPECT_EQ(at_once, 3 * 16u);  // all but the first of a group
}

TEST(engine_a_large_module_is_cut_between_its_weights) {
  EngineOptions options = with_budget(0);
  options.split_bytes = 64 * kMiB;
  const auto engine = std::make_shared<Engine>(std::make_unique<sim::VirtualBackend>(kBus, 0), options);
  for (int i = 0; i < 4; ++i) {
    engine->add_weight(make_source(40 * kMiB), 7);
    engine->add_weight(make_source(4096), 7);  // a bias goes with the weight before it
  }
  engine->plan();
  EXPECT_EQ(engine->stats().groups, 4u);
}

TEST(engine_what_is_needed_at_once_is_never_cut) {
  EngineOptions options = with_budget(100 * kMiB);
  const auto made = [&options] {
    auto engine = std::make_shared<Engine>(std::make_unique<sim::VirtualBackend>(kBus, 0), options);
    for (std::uint64_t unit = 0; unit < 3; ++unit) {
      for (int i = 0; i < 4; ++i) engine->add_weight(make_source(40 * kMiB), unit, {.at_once = true});
    }
    return engine;
  };
  EXPECT_THROWS(made()->plan(), BudgetError);
  options.budget = 160 * kMiB;
  const auto engine = made();
  engine->plan();
  EXPECT_EQ(engine->stats().groups, 3u);
}

TEST(engine_units_that_share_a_weight_travel_together) {
  const WeightOptions at_once{.at_once = true};
  const auto made = [&](std::size_t budget, std::uint64_t others) {
    auto engine =
        std::make_shared<Engine>(std::make_unique<sim::VirtualBackend>(kBus, 0), with_budget(budget));
    const WeightId shared = engine->add_weight(make_source(40 * kMiB), 0, at_once);
    for (std::uint64_t unit = 1; unit <= others; ++unit) {
      engine->add_weight(make_source(40 * kMiB), 10 + unit, at_once);
      engine->add_weight(make_source(30 * kMiB), unit, at_once);
      engine->share_weight(shared, unit, at_once);
    }
    return engine;
  };
  EXPECT_THROWS(made(70 * kMiB - 1, 1)->plan(), BudgetError);
  const auto pair = made(70 * kMiB, 1);
  pair->plan();
  EXPECT(pair->companions(0) == (std::vector<WeightId>{0, 2}));
  EXPECT(!pair->resident(0));
  // All that many share would be much more than any of them needs.
  EXPECT_THROWS(made(80 * kMiB - 1, 5)->plan(), BudgetError);
  const auto many = made(80 * kMiB, 5);
  many->plan();
  EXPECT_EQ(many->companions(0).size(), 1u);
  EXPECT(many->resident(0));
}

TEST(engine_says_whether_the_budget_holds_all) {
  for (const std::size_t spare : {std::size_t{0}, std::size_t{1}}) {
    EngineOptions options = with_budget(12 * kMiB - spare);
    const auto engine = std::make_shared<Engine>(std::make_unique<sim::VirtualBackend>(kBus, 0), options);
    for (std::uint64_t unit = 0; unit < 3; ++unit) engine->add_weight(make_source(4 * kMiB), unit);
    EXPECT_EQ(engine->holds_all(), spare == 0);
    engine->plan();
    EXPECT_EQ(engine->stats().resident_groups == engine->stats().groups, spare == 0);
  }
}

TEST(engine_an_outdated_weight_of_a_group_in_use_is_copied_alone) {
  EngineOptions options = with_budget(8 * kMiB, 0);
  options.strict_budget = true;
  const auto engine = std::make_shared<Engine>(std::make_unique<sim::VirtualBackend>(kBus, 0), options);
  std::vector<WeightId> weights;
  for (std::uint64_t unit = 0; unit < 2; ++unit) {
    for (int i = 0; i < 2; ++i)
      weights.push_back(engine->add_weight(make_source(4 * kMiB), unit, {.at_once = true}));
  }
  engine->plan();
  const auto changed = [&](std::size_t weight) {
    engine->update_source_alone(weights[weight], make_source(4 * kMiB));
  };
  Lease held = engine->acquire(weights[0], 0);
  changed(1);
  const std::uint64_t before = engine->stats().bytes_moved;
  {
    const Lease other = engine->acquire(weights[1], 0);
    EXPECT_EQ(other.data() - held.data(), static_cast<std::ptrdiff_t>(4 * kMiB));
    EXPECT_EQ(engine->stats().bytes_moved - before, 4 * kMiB);
    changed(1);  // somebody has it: its bytes stay, and there is no room for others
    EXPECT_THROWS(engine->acquire(weights[1], 0), BudgetError);
  }
  held.release();
  const Lease again = engine->acquire(weights[1], 0);
  EXPECT_EQ(engine->stats().bytes_moved - before, 12 * kMiB);  // it went with its last lease, as a whole
  EXPECT_EQ(engine->stats().overflow_bytes, 0u);
}

TEST(engine_budget_too_small_holds_nothing) {
  const auto device = std::make_shared<FakeDevice>(1);
  auto engine = std::make_shared<Engine>(device->backend(), with_budget(100));
  engine->add_weight(make_source(5000), 0);
  EXPECT_THROWS(engine->plan(), BudgetError);
  EXPECT_EQ(device->live_bytes(), 0u);
}

TEST(engine_that_cannot_allocate_holds_nothing) {
  auto backend = std::make_unique<sim::VirtualBackend>(kBus, 0, 20 * kMiB);
  const sim::VirtualBackend* clock = backend.get();
  auto engine = std::make_shared<Engine>(std::move(backend), with_budget(30 * kMiB));
  for (std::size_t i = 0; i < 12; ++i) engine->add_weight(make_source(4 * kMiB), i);
  EXPECT_THROWS(engine->plan(), OutOfMemory);
  EXPECT_EQ(clock->allocated_bytes(), 0u);
}

TEST(engine_held_leases_overflow_are_counted_and_warned_about_once) {
  Model model(std::vector<std::size_t>(8, 8 * kMiB), with_budget(16 * kMiB, 1));
  std::vector<Lease> held;
  for (std::size_t i = 0; i < 8; ++i) held.push_back(model.engine->acquire(model.weights[i], 0));
  EXPECT_EQ(model.stats().arena_bytes, 16 * kMiB);
  EXPECT_EQ(model.stats().overflow_bytes, 48 * kMiB);
  EXPECT_EQ(model.clock->allocated_bytes(), 64 * kMiB);
  EXPECT_EQ(model.stats().live_leases, 8u);
  EXPECT_EQ(model.warnings.size(), 1u);
  EXPECT(!model.warnings.empty() && model.warnings.front().find("layer 0") != std::string::npos);
  model.clock->kernel(1);
  held.clear();
  model.use(0);
  EXPECT_EQ(model.clock->allocated_bytes(), 16 * kMiB);
  EXPECT_EQ(model.stats().peak_bytes, 64 * kMiB);
  for (std::size_t i = 0; i < 4; ++i) held.push_back(model.engine->acquire(model.weights[i], 0));
  EXPECT_EQ(model.stats().overflow_bytes, 48 * kMiB);  // the most at one time
}

TEST(engine_strict_budget_raises_and_stays_usable) {
  EngineOptions options = with_budget(0, 1);
  options.strict_budget = true;
  Model model(std::vector<std::size_t>(8, 8 * kMiB), options);
  {
    const Lease first = model.engine->acquire(model.weights[0], 0);
    const Lease second = model.engine->acquire(model.weights[1], 0);
    EXPECT_THROWS(model.engine->acquire(model.weights[2], 0), BudgetError);
    EXPECT_EQ(model.stats().live_leases, 2u);
  }
  for (int i = 0; i < 2; ++i) model.pass();
  EXPECT_EQ(model.stats().overflow_bytes, 0u);
}

TEST(engine_closed_says_so) {
  Model model({kMiB}, with_budget(0));
  model.engine->close();
  model.engine->close();
  EXPECT_THROWS(model.engine->acquire(model.weights[0], 0), Error);
  EXPECT_EQ(model.clock->allocated_bytes(), 0u);
}

TEST(engine_without_weights) {
  Model model({}, with_budget(kMiB));
  EXPECT_EQ(model.stats().groups, 0u);
  EXPECT_EQ(model.clock->allocated_bytes(), 0u);
}

TEST(engine_replaced_master_must_have_the_same_shape) {
  Model model({kMiB}, with_budget(0));
  EXPECT_THROWS(model.engine->update_source(model.weights[0], make_source(kMiB - 1)), Error);
  const SourcePtr next = make_source(kMiB, "next");
  model.use(0);
  model.engine->update_source(model.weights[0], next);
  EXPECT(model.engine->source(model.weights[0]) == next);
  model.use(0);
  EXPECT_EQ(model.stats().refetches, 1u);
  EXPECT_EQ(model.clock->copies(), 2u);
}

TEST(engine_lease_moves) {
  Model model({kMiB, kMiB}, with_budget(0));
  Lease first = model.engine->acquire(model.weights[0], 0);
  Lease second = std::move(first);
  EXPECT(!first);
  EXPECT(second && second.data() != nullptr);
  EXPECT_EQ(model.stats().live_leases, 1u);
  second = model.engine->acquire(model.weights[1], 0);
  EXPECT_EQ(model.stats().live_leases, 1u);
  second.release();
  second.release();
  EXPECT_EQ(model.stats().live_leases, 0u);
}

TEST(engine_what_a_lease_leaves_is_for_the_next_lease_on_the_same_bytes) {
  Model model({kMiB, kMiB, kMiB, kMiB}, with_budget(2 * kMiB, 0));
  const auto leave = [&](std::size_t weight) {
    const auto what = std::make_shared<int>(1);
    model.engine->acquire(model.weights[weight], 0).release(what);
    return std::weak_ptr<int>(what);
  };
  const auto found = [&](std::size_t weight) {
    Lease lease = model.engine->acquire(model.weights[weight], 0);
    const bool any = lease.take_left() != nullptr;
    EXPECT(lease.take_left() == nullptr);
    return any;
  };
  EXPECT(!leave(0).expired());
  EXPECT(found(0));
  EXPECT(!found(0));  // it is not put back

  const std::weak_ptr<int> unwanted = leave(0);
  model.use(0);
  EXPECT(unwanted.expired());

  {  // somebody else has the bytes
    const Lease other = model.engine->acquire(model.weights[0], 0);
    EXPECT(leave(0).expired());
  }
  EXPECT(!found(0));

  const std::weak_ptr<int> displaced = leave(0);
  model.use(1);
  model.use(2);
  EXPECT(displaced.expired());
  EXPECT(!found(0));

  const std::weak_ptr<int> outdated = leave(0);
  model.engine->update_source(model.weights[0], make_source(kMiB));
  EXPECT(!found(0));
  EXPECT(outdated.expired());

  const std::weak_ptr<int> closed = leave(0);
  Lease late = model.engine->acquire(model.weights[1], 0);
  model.engine->close();
  EXPECT(closed.expired());
  const auto too_late = std::make_shared<int>(1);
  late.release(too_late);
  EXPECT_EQ(too_late.use_count(), 1);
}

}  // namespace dynswap::test
