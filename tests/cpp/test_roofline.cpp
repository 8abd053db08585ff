// How close to max(compute, copy) the engine comes, on the virtual clock.
#include "check.h"
#include "shapes.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <vector>

namespace dynswap::test {

namespace {

constexpr double kBus = 50e9;      // bytes a second
constexpr double kLatency = 6e-6;  // seconds a copy
constexpr int kPasses = 6;
const std::vector<double> kRatios{0.1, 0.5, 0.8, 1, 1.25, 10};       // compute:copy, if all is streamed
const std::vector<double> kBudgets{0, 0.05, 0.15, 0.25, 0.5, 0.75};  // of the model

/// The largest ratio of time to limit over the budgets and compute:copy ratios; every one above `bar` fails.
void expect_within(double bar, const char* name, const Shape& shape, Compute compute) {
  const bool verbose = std::getenv("DYNSWAP_VERBOSE") != nullptr;
  double worst = 0;
  for (const double share : kBudgets) {
    for (const double ratio : kRatios) {
      EngineOptions options;
      options.prefetch = 2;
      options.budget = static_cast<std::size_t>(share * static_cast<double>(shape.bytes()));
      sim::Result result;
      try {
        result = sim::simulate(shape.balance(compute, ratio, kBus), options, kBus, kLatency, kPasses);
      } catch (const BudgetError& error) {
        options.budget = error.smallest_bytes();
        result = sim::simulate(shape.balance(compute, ratio, kBus), options, kBus, kLatency, kPasses);
      }
      worst = std::max(worst, result.ratio);
      if (verbose || result.ratio > bar) {
        std::printf(
            "%s budget %.2f (%zu MB) compute:copy %.2f: ratio %.4f, misses %.1f, copies %.1f of %zu, "
            "resident %zu MB, arena %zu MB, depth %zu, moved %.3f, stall %.4f s of %.4f s\n",
            name, share, options.budget >> 20, ratio, result.ratio, result.misses, result.copies,
            static_cast<std::size_t>(result.streamed_groups),
            static_cast<std::size_t>(result.resident_bytes >> 20),
            static_cast<std::size_t>(result.arena_bytes >> 20), static_cast<std::size_t>(result.depth),
            result.streamed_bytes > 0 ? result.moved_bytes / static_cast<double>(result.streamed_bytes) : 1.0,
            result.stall_seconds, result.seconds);
      }
      EXPECT(result.ratio <= bar);
    }
  }
  std::printf("%s: worst ratio %.4f\n", name, worst);
}

}  // namespace

TEST(roofline_uniform_layers) {
  expect_within(1.03, "uniform", uniform(60, 32u << 20), Compute::bytes);
  expect_within(1.03, "uniform, small", uniform(300, 1u << 20), Compute::bytes);
}

TEST(roofline_real_shapes) {
  expect_within(1.08, "FLUX", flux_transformer(), Compute::bytes);
  expect_within(1.08, "SDXL", sdxl_unet(), Compute::bytes);
}

// A host that takes longer than the bus and the device decides how long a pass takes: as many weights and
// modules as there are. One that is quicker runs ahead, and only its first weight, before which nothing can
// begin, shows.
TEST(roofline_time_of_the_host) {
  constexpr std::size_t kLayers = 60;
  EngineOptions options;
  options.prefetch = 2;
  const auto seconds = [&](double compute, std::optional<sim::HostTimes> host) {
    sim::Workload workload = uniform(kLayers, 16u << 20).balance(Compute::bytes, compute, kBus);
    workload.host = host;
    const sim::Result result = sim::simulate(workload, options, kBus, kLatency, kPasses);
    EXPECT(result.moved_bytes >= static_cast<double>(result.streamed_bytes));
    return result.seconds;
  };
  const auto is = [](double value, double expected) { return std::abs(value / expected - 1) < 1e-3; };
  EXPECT(is(seconds(0.1, sim::HostTimes{2e-3, 0}), kLayers * 2e-3));
  EXPECT(is(seconds(0.1, sim::HostTimes{1e-3, 1e-3}), kLayers * 2e-3));
  for (const double compute : {0.1, 10.0}) {
    const double free = seconds(compute, sim::HostTimes{});
    EXPECT(is(seconds(compute, sim::HostTimes{1e-9, 1e-9}), free));
    const double slower = seconds(compute, sim::HostTimes{100e-6, 0});
    EXPECT(slower >= free && slower <= free + 3 * 100e-6);
    EXPECT(free <= seconds(compute, std::nullopt));
  }
}

// N ranks need 1/N of the time that one needs for its bus, as far as the link between them lets them. A pass
// of four equal buses has 1/4 of the bytes, and nothing travels twice.
TEST(roofline_ranks_that_share_out_copies) {
  constexpr std::size_t kLayers = 60;
  EngineOptions options;
  options.prefetch = 2;
  for (const double compute : {0.1, 10.0}) {
    for (const std::size_t ranks : {2u, 4u, 8u}) {
      for (const double link : {8 * kBus, kBus / 2}) {
        sim::Workload workload = uniform(kLayers, 16u << 20).balance(Compute::bytes, compute, kBus);
        const sim::Result alone = sim::simulate(workload, options, kBus, kLatency, kPasses);
        workload.mesh = sim::Mesh{ranks, link};
        const sim::Result result = sim::simulate(workload, options, kBus, kLatency, 2 * kPasses);
        std::printf("compute:copy %.1f, %zu ranks, link:bus %.1f: ratio %.4f, %.1f of %.1f copies gathered\n",
                    compute, ranks, link / kBus, result.ratio, result.gathered, result.copies);
        // Where the link is the slower of the two, copies of whole groups are left to be faster.
        const bool faster = result.link_seconds < alone.copy_seconds;
        EXPECT(faster == (result.gathered == result.copies));
        EXPECT(faster == (result.moved_bytes * static_cast<double>(ranks) ==
                          static_cast<double>(result.streamed_bytes)));
        EXPECT(!faster || result.ratio <= 1.05);
        EXPECT(faster || std::abs(result.seconds / alone.seconds - 1) < 1e-3);
      }
    }
  }
}

// Where compute and copy balance, what stays decides how long a pass takes.
TEST(roofline_residents_by_time_beat_even_ones) {
  const auto gain = [](const Shape& shape, double share, double ratio) {
    EngineOptions options;
    options.budget = static_cast<std::size_t>(share * static_cast<double>(shape.bytes()));
    const sim::Workload workload = shape.balance(Compute::operations, ratio, kBus);
    const sim::Result even = sim::simulate(workload, options, kBus, kLatency, kPasses);
    const sim::Result timed =
        sim::simulate(workload, options, kBus, kLatency, kPasses, sim::Residents::by_time);
    std::printf("budget %.2f compute:copy %.2f: even %.4f s, by time %.4f s, compute alone %.4f s\n", share,
                ratio, even.seconds, timed.seconds, timed.compute_seconds);
    EXPECT(timed.resident_bytes + timed.arena_bytes <= options.budget);
    return even.seconds / timed.seconds;
  };
  EXPECT(gain(flux_transformer(), 0.5, 0.5) > 1.1);
  EXPECT(gain(flux_transformer(), 0.15, 0.8) > 1.02);
  EXPECT(gain(sdxl_unet(), 0.5, 0.5) > 1.03);
  EXPECT(gain(sdxl_unet(), 0.5, 1.0) > 0.999);  // compute hides all copies already
}

// Note [What a ring cannot even out]: near compute:copy = 1 a model whose parts differ in operations a byte
// (convolutions over many pixels beside large linear layers over few) would need a ring as large as the
// imbalance, or residents chosen by time. And two neighbours of a gigabyte each (Llama's head and, in the
// next pass, its embedding) leave a budget of little more nothing to overlap with. So the bar here only
// guards what has been reached; on machines as they are: benchmarks/virtual_clock.py.
TEST(roofline_real_shapes_at_the_worst_balance) {
  constexpr double kReached = 1.25;
  expect_within(kReached, "Llama-3-8B", llama_3_8b(), Compute::operations);
  expect_within(kReached, "FLUX", flux_transformer(), Compute::operations);
  expect_within(kReached, "SDXL", sdxl_unet(), Compute::operations);
}

}  // namespace dynswap::test
