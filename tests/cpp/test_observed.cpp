// What is recorded of a model's passes: when, how long, and why anybody waited.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "sim/measure.h"
#include "sim/observed.h"
#include "sim/placement.h"
#include "sim/virtual_backend.h"

namespace dynswap::test {

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr double kBus = 8.0 * kMiB * 1000;  // a group of 8 MiB takes a millisecond
constexpr double kCopy = 1e-3;

/// Groups of 8 MiB over the virtual clock.
struct Model {
  Model(std::size_t groups, EngineOptions options) {
    auto backend = std::make_unique<sim::VirtualBackend>(kBus, 0);
    clock = backend.get();
    options.group_bytes = 1;
    engine = std::make_shared<Engine>(std::move(backend), options);
    for (std::size_t i = 0; i < groups; ++i) {
      auto source = std::make_shared<Source>();
      source->name = "w" + std::to_string(i);
      source->count = 8 * kMiB;
      engine->add_weight(std::move(source), i);
    }
    engine->plan();
  }

  void use(WeightId weight, double compute) {
    const Lease lease = engine->acquire(weight, 0);
    clock->kernel(compute);
  }

  void pass(double compute) {
    engine->note_pass(0);
    for (WeightId i = 0; i < engine->groups().size(); ++i) use(i, compute);
  }

  std::uint64_t stalled(Cause cause) const {
    std::uint64_t ns = 0;
    for (const auto& group : engine->groups()) ns += group.figures.stall_ns[static_cast<std::size_t>(cause)];
    return ns;
  }

  std::uint64_t stalled() const {
    std::uint64_t ns = 0;
    for (int cause = 0; cause < static_cast<int>(Cause::count); ++cause)
      ns += stalled(static_cast<Cause>(cause));
    return ns;
  }

  sim::VirtualBackend* clock;
  std::shared_ptr<Engine> engine;
};

EngineOptions with(std::size_t budget, std::uint32_t prefetch = 2) {
  EngineOptions options;
  options.budget = budget;
  options.prefetch = prefetch;
  return options;
}

bool near(double a, double b) { return std::abs(a - b) <= 0.01 * std::abs(b) + 1e-8; }

}  // namespace

TEST(causes_the_bus_is_the_limit) {
  Model model(10, with(0));
  for (int i = 0; i < 2; ++i) model.pass(0.2 * kCopy);
  model.engine->reset_counters();
  for (int i = 0; i < 2; ++i) model.pass(0.2 * kCopy);
  EXPECT(model.stalled() > 0);
  EXPECT_EQ(model.stalled(Cause::bus_bound), model.stalled());
  EXPECT_EQ(model.stalled(), model.engine->stats().stall_ns);
}

TEST(causes_enough_compute_hides_all) {
  Model model(10, with(0));
  for (int i = 0; i < 2; ++i) model.pass(1.5 * kCopy);
  model.engine->reset_counters();
  model.pass(1.5 * kCopy);
  EXPECT_EQ(model.stalled(), 0u);
}

TEST(causes_first_uses_and_what_nobody_foresaw) {
  Model model(10, with(0));
  model.use(0, kCopy);
  EXPECT(model.stalled(Cause::first_use) > 0);
  for (int i = 0; i < 3; ++i) model.pass(1.5 * kCopy);
  model.engine->reset_counters();
  model.use(6, 1.5 * kCopy);  // after 9, that is a surprise
  EXPECT(model.stalled(Cause::not_predicted) > 0);
  EXPECT_EQ(model.stalled(Cause::not_predicted), model.stalled());
}

TEST(causes_without_prefetch_every_copy_is_late) {
  Model model(10, with(0, 0));
  model.pass(kCopy);
  model.engine->reset_counters();
  model.pass(kCopy);
  EXPECT(model.stalled() > 0);
  EXPECT_EQ(model.stalled(Cause::late_prefetch), model.stalled());
}

TEST(causes_a_ring_of_one_is_full) {
  Model model(10, with(8 * kMiB));
  for (int i = 0; i < 2; ++i) model.pass(kCopy);
  model.engine->reset_counters();
  model.pass(kCopy);
  EXPECT(model.stalled() > 0);
  EXPECT_EQ(model.stalled(Cause::arena_full), model.stalled());
}

TEST(causes_a_held_slot_names_its_holder) {
  Model model(10, with(0));
  for (int i = 0; i < 2; ++i) model.pass(1.5 * kCopy);
  model.engine->reset_counters();
  const Lease second = model.engine->acquire(2, 0);
  const Lease third = model.engine->acquire(3, 0);
  model.clock->kernel(5 * kCopy);
  for (WeightId i = 4; i < 8; ++i) model.use(i, 1.5 * kCopy);
  EXPECT(model.stalled(Cause::slot_held) > 0);
  bool named = false;
  for (const auto& group : model.engine->groups()) {
    named = named || (group.figures.held_by && (*group.figures.held_by == 2 || *group.figures.held_by == 3));
  }
  EXPECT(named);
}

TEST(causes_a_changed_master_travels_again) {
  Model model(10, with(100 * 8 * kMiB));
  for (int i = 0; i < 2; ++i) model.pass(kCopy);
  model.engine->reset_counters();
  model.engine->update_source(4, std::make_shared<Source>(*model.engine->source(4)));
  model.pass(kCopy);
  EXPECT(model.stalled(Cause::master_changed) > 0);
  EXPECT_EQ(model.stalled(Cause::master_changed), model.stalled());
}

TEST(recording_sees_copies_waits_and_uses_on_one_clock) {
  Model model(6, with(0));
  for (int i = 0; i < 2; ++i) model.pass(0.5 * kCopy);
  EXPECT(model.engine->timeline().spans.empty());
  model.engine->record(true);
  for (int i = 0; i < 3; ++i) model.pass(0.5 * kCopy);
  model.engine->record(false);
  model.pass(0.5 * kCopy);
  const Timeline timeline = model.engine->timeline();
  EXPECT_EQ(timeline.dropped, 0u);
  std::size_t uses = 0, passes = 0, copies = 0;
  std::int64_t copied = 0;
  std::int64_t until = 0;
  for (const Span& span : timeline.spans) {
    EXPECT(span.when.begin >= until);
    until = span.when.begin;
    uses += span.kind == Span::Kind::use;
    passes += span.kind == Span::Kind::pass;
    if (span.kind == Span::Kind::use) EXPECT(span.bytes > 0 && span.bytes <= 3 * 8 * kMiB);
    if (span.kind != Span::Kind::copy) continue;
    ++copies;
    copied += span.when.end - span.when.begin;
    EXPECT_EQ(span.bytes, 8 * kMiB);
  }
  EXPECT_EQ(passes, 3u);
  EXPECT_EQ(uses, 3u * 6);
  EXPECT(copies >= 3u * 6 - 3 && copies <= 3u * 6 + 3);
  EXPECT(near(static_cast<double>(copied) * 1e-9, static_cast<double>(copies) * kCopy));
}

TEST(observed_passes_are_what_was_run) {
  Model model(8, with(5 * 8 * kMiB));
  const auto compute = [](WeightId i) { return (0.2 + 0.3 * i) * kCopy; };
  const auto pass = [&] {
    model.engine->note_pass(0);
    for (WeightId i = 0; i < 8; ++i) {
      if (model.engine->resident(i)) model.engine->note_use(i, 0);
      model.use(i, compute(i));
    }
  };
  for (int i = 0; i < 2; ++i) pass();
  model.engine->record(true);
  for (int i = 0; i < 2; ++i) pass();
  model.engine->note_pass(0);
  model.engine->record(false);
  const sim::Observed seen = sim::observe(model.engine->timeline(), model.engine->groups());
  EXPECT_EQ(seen.passes, 2u);
  EXPECT(near(seen.pattern.bytes_per_second, kBus));
  EXPECT_EQ(seen.pattern.steps.size(), 16u);
  double total = 0;
  for (std::size_t i = 0; i < seen.pattern.steps.size(); ++i) {
    EXPECT_EQ(seen.pattern.steps[i].group, i % 8);
    EXPECT(near(seen.pattern.steps[i].compute_seconds, compute(static_cast<WeightId>(i % 8))));
    total += seen.pattern.steps[i].compute_seconds / 2;
  }
  EXPECT(near(seen.compute_seconds, total));

  // And what the engine would take for them is what it took.
  const double begin = model.clock->seconds();
  pass();
  const double seconds = model.clock->seconds() - begin;
  const std::vector<bool> resident = model.engine->plan_for_reuse().resident;
  EXPECT(near(sim::measure(seen.pattern, resident, 0, 5 * 8 * kMiB, 2) / 2, seconds));
}

TEST(observed_threads_are_one_consumer) {
  constexpr std::int64_t kUnit = 1000000;  // a millisecond
  Timeline timeline;
  const auto add = [&](std::uint64_t thread, Span::Kind kind, std::int64_t begin, std::int64_t end,
                       std::uint32_t group = 0) {
    Span span;
    span.kind = kind;
    span.group = group;
    span.when = {begin * kUnit, end * kUnit};
    span.thread = thread;
    timeline.spans.push_back(span);
  };
  add(1, Span::Kind::pass, 0, 0);
  add(1, Span::Kind::use, 0, 0, 0);
  add(2, Span::Kind::pass, 100, 100);
  add(2, Span::Kind::wait, 100, 300, 0);
  add(1, Span::Kind::wait, 200, 400, 1);  // from 200 to 300 both wait
  add(2, Span::Kind::use, 300, 300, 0);
  add(1, Span::Kind::use, 400, 400, 1);
  add(2, Span::Kind::wait, 450, 500, 1);  // while the other one computes
  add(2, Span::Kind::use, 500, 500, 1);
  add(1, Span::Kind::pass, 600, 600);
  const sim::Observed seen = sim::observe(timeline, std::vector<Engine::GroupReport>(2));
  EXPECT_EQ(seen.passes, 2u);
  EXPECT(near(seen.compute_seconds, 0.250));
  EXPECT(near(seen.wait_seconds, 0.225));
  EXPECT_EQ(seen.pattern.steps.size(), 2u);
  EXPECT_EQ(seen.pattern.steps[0].group, 0u);
  EXPECT(near(seen.pattern.steps[0].compute_seconds, 0.300));
  EXPECT_EQ(seen.pattern.steps[1].group, 1u);
  EXPECT(near(seen.pattern.steps[1].compute_seconds, 0.200));
}

TEST(observed_passes_of_threads_that_make_one_each) {
  Model model(4, with(0));
  model.engine->record(true);
  for (int i = 0; i < 3; ++i) std::thread([&] { model.pass(kCopy); }).join();
  EXPECT_EQ(sim::observe(model.engine->timeline(), model.engine->groups()).passes, 2u);
}

TEST(observed_nothing_without_two_beginnings) {
  Model model(4, with(0));
  model.engine->record(true);
  model.pass(kCopy);
  EXPECT_EQ(sim::observe(model.engine->timeline(), model.engine->groups()).passes, 0u);
}

}  // namespace dynswap::test
