// Experts that are copied before their router has chosen: what it saves on the virtual clock, and what it
// costs.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "check.h"
#include "core/by_use.h"
#include "core/engine.h"
#include "random.h"
#include "sim/virtual_backend.h"

namespace dynswap::test {

namespace {

constexpr std::size_t kExpert = 1000;
constexpr double kBus = 1000;  // a second for an expert
constexpr std::size_t kLayers = 6, kExperts = 32, kActive = 4;

/// Layers of a dense weight, which stays on the device, and experts.
struct Shape {
  double cached = 0.25;   ///< part of the experts that there is room for
  double window = 1;      ///< seconds that a layer computes
  double accuracy = 0.9;  ///< part of the choices that is guessed right
  bool skewed = false;    ///< some experts are chosen more often than others

  struct Outcome {
    double seconds = 0;
    Stats stats;
  };

  Outcome run(bool guesses) const {
    EngineOptions options;
    options.prefetch = 2;
    options.group_bytes = 1;
    const auto room = static_cast<std::size_t>(cached * kLayers * kExperts);
    options.budget = (kLayers + std::max(room, kActive + 1)) * kExpert;
    auto backend = std::make_unique<sim::VirtualBackend>(kBus, 0);
    sim::VirtualBackend& clock = *backend;
    const auto engine = std::make_shared<Engine>(std::move(backend), options);
    std::vector<WeightId> dense;
    std::vector<std::vector<WeightId>> experts(kLayers);
    std::uint64_t unit = 0;
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      for (std::size_t i = 0; i <= kExperts; ++i) {
        auto source = std::make_shared<Source>();
        source->count = kExpert;
        const WeightId id = engine->add_weight(std::move(source), unit++, {.by_use = i > 0});
        (i > 0 ? experts[layer] : dense).push_back(id);
      }
    }
    engine->plan();

    Random random(1);
    const auto any = [&](const std::vector<WeightId>& of) {
      return of[skewed && random.chance(0.7) ? random.below(kExperts / 4) : random.below(kExperts)];
    };
    const auto choose = [&](const std::vector<WeightId>& of, std::vector<WeightId> chosen) {
      while (chosen.size() < kActive) {
        const WeightId id = any(of);
        if (std::find(chosen.begin(), chosen.end(), id) == chosen.end()) chosen.push_back(id);
      }
      return chosen;
    };
    std::uint32_t rest = 0;
    const auto pass = [&] {
      std::vector<WeightId> chosen = choose(experts[0], {});
      for (std::size_t layer = 0; layer < kLayers; ++layer) {
        {
          const Lease lease = engine->acquire(dense[layer], sim::kConsumer);
          clock.kernel(0.4 * window);
        }
        engine->expect(chosen);
        std::vector<WeightId> next;
        if (layer + 1 < kLayers) {
          next = choose(experts[layer + 1], {});
          std::vector<WeightId> right;
          for (const WeightId id : next) {
            if (random.chance(accuracy)) right.push_back(id);
          }
          const std::vector<WeightId> guessed = choose(experts[layer + 1], right);
          if (rest > 0) {
            --rest;
          } else if (guesses) {
            rest = engine->guess(guessed);
          }
        }
        for (const WeightId id : chosen) {
          const Lease lease = engine->acquire(id, sim::kConsumer);
          clock.kernel(0.6 * window / kActive);
        }
        chosen = next;
      }
    };
    for (int i = 0; i < 40; ++i) pass();
    engine->reset_counters();
    const double begin = clock.seconds();
    for (int i = 0; i < 80; ++i) pass();
    EXPECT_EQ(engine->stats().overflow_bytes, 0u);
    EXPECT(engine->stats().peak_bytes <= options.budget);
    return {clock.seconds() - begin, engine->stats()};
  }
};

}  // namespace

TEST(guesses_that_are_right_hide_copies_behind_compute) {
  const Shape shape;
  const Shape::Outcome without = shape.run(false), with = shape.run(true);
  std::printf("guesses: %.3f of the time, %.3f of the bytes\n", with.seconds / without.seconds,
              static_cast<double>(with.stats.bytes_moved) / static_cast<double>(without.stats.bytes_moved));
  EXPECT(with.seconds < 0.92 * without.seconds);
  EXPECT(with.stats.bytes_moved < 1.1 * static_cast<double>(without.stats.bytes_moved));
  EXPECT(with.stats.right_guesses > 0.6 * static_cast<double>(with.stats.guesses));
  EXPECT(with.stats.guesses > 80 * (kLayers - 1) / 2);
  EXPECT_EQ(without.stats.guesses, 0u);
}

TEST(guesses_that_do_not_pay_are_left_out) {
  double worst = 0, best = 1;
  for (const bool skewed : {false, true}) {
    for (const double cached : {0.25, 0.5}) {
      for (const double window : {0.35, 1.0, 3.0}) {
        for (const double accuracy : {1.0, 0.8, 0.5, 0.0}) {
          const Shape shape{cached, window, accuracy, skewed};
          const double ratio = shape.run(true).seconds / shape.run(false).seconds;
          worst = std::max(worst, ratio);
          best = std::min(best, ratio);
        }
      }
    }
  }
  std::printf("with guesses / without: from %.3f to %.3f of the time\n", best, worst);
  EXPECT(worst < 1.02);
  EXPECT(best < 0.85);
}

TEST(guesses_displace_nothing_that_is_needed_and_nothing_that_is_held) {
  EngineOptions options;
  options.group_bytes = 1;
  options.budget = 5 * kExpert;  // with room for three experts
  options.prefetch = 2;
  auto backend = std::make_unique<sim::VirtualBackend>(kBus, 0);
  const auto engine = std::make_shared<Engine>(std::move(backend), options);
  std::vector<WeightId> ids;
  for (std::uint64_t i = 0; i < 8; ++i) {
    auto source = std::make_shared<Source>();
    source->count = kExpert;
    ids.push_back(engine->add_weight(std::move(source), i, {.by_use = i > 0}));
  }
  engine->plan();
  const auto use = [&](int i) { return engine->acquire(ids[static_cast<std::size_t>(i)], sim::kConsumer); };
  for (const int i : {1, 2, 3}) use(i);
  const Lease held = use(3);
  engine->expect({ids[1], ids[2]});
  EXPECT_EQ(engine->guess({ids[4], ids[5]}), 0u);  // no place: 1 and 2 are needed, 3 is held
  EXPECT_EQ(engine->stats().guesses, 0u);
  use(1);
  use(2);
  engine->expect({ids[1]});
  engine->guess({ids[4], ids[5]});  // in the place of 2: one at first
  EXPECT_EQ(engine->stats().guesses, 1u);
  engine->expect({ids[4]});
  const std::uint64_t misses = engine->stats().misses;
  use(4);
  use(1);
  EXPECT_EQ(engine->stats().misses, misses);
  engine->guess({});
  EXPECT_EQ(engine->stats().right_guesses, 1u);
  EXPECT_EQ(engine->stats().wasted_prefetches, 0u);
}

TEST(guesses_are_left_out_for_longer_each_time_that_they_do_not_pay) {
  GuessLimit limit;
  EXPECT_EQ(limit.most(), 1u);
  EXPECT_EQ(limit.learn(0, 1, 1), 8u);
  EXPECT_EQ(limit.learn(0, 1, 1), 16u);
  EXPECT_EQ(limit.learn(1, 3, 0), 0u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(limit.learn(2, 1, 0), 0u);
  EXPECT(limit.most() > 8);
  std::uint32_t rest = 0;
  for (int i = 0; i < 200 && rest == 0; ++i) rest = limit.learn(0, 1, 0);  // wrong, but in nobody's way
  EXPECT_EQ(rest, 8u);
  EXPECT_EQ(limit.most(), 1u);
  rest = 0;
  for (int i = 0; i < 200 && rest == 0; ++i) rest = limit.learn(0, 0, 0);  // there was nothing to fetch
  EXPECT_EQ(rest, 16u);
}

}  // namespace dynswap::test
