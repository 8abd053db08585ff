// Residents by time: near the best there is, and never behind the even placement or a prefix.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "core/residency.h"
#include "random.h"
#include "sim/access_pattern.h"
#include "sim/measure.h"
#include "sim/placement.h"

namespace dynswap::test {

namespace {

using sim::AccessPattern;
using sim::Placement;

constexpr std::uint32_t kPrefetch = 2;
constexpr int kCases = 16;
constexpr std::size_t kMiB = std::size_t{1} << 20;

/// A model whose parts differ in compute a byte, as real ones do.
AccessPattern random_pattern(Random& random, std::size_t groups) {
  AccessPattern pattern;
  pattern.bytes_per_second = 10e9;
  pattern.latency = 6e-6;
  const double balance = 0.3 + 0.1 * static_cast<double>(random.below(20));  // compute : copy
  for (std::uint32_t i = 0; i < groups; ++i) {
    pattern.groups.push_back({.bytes = random.between(1, 16) * kMiB});
    const double copy = static_cast<double>(pattern.groups.back().bytes) / pattern.bytes_per_second;
    pattern.steps.push_back({i, balance * copy * static_cast<double>(random.below(5)) / 2, true});
  }
  return pattern;
}

std::size_t total(const AccessPattern& pattern) {
  std::size_t bytes = 0;
  for (const GroupTraits& group : pattern.groups) bytes += group.bytes;
  return bytes;
}

std::size_t largest(const AccessPattern& pattern) {
  std::size_t bytes = 0;
  for (const GroupTraits& group : pattern.groups) bytes = std::max(bytes, group.bytes);
  return bytes;
}

double measure(const AccessPattern& pattern, const std::vector<bool>& resident, std::size_t budget) {
  return sim::measure(pattern, resident, 0, budget, kPrefetch);
}

/// The best of all sets of residents.
double exhaustive(const AccessPattern& pattern, std::size_t budget) {
  double best = std::numeric_limits<double>::infinity();
  const std::size_t groups = pattern.groups.size();
  for (std::size_t set = 0; set < std::size_t{1} << groups; ++set) {
    std::vector<bool> resident(groups);
    for (std::size_t i = 0; i < groups; ++i) resident[i] = (set >> i) & 1;
    best = std::min(best, measure(pattern, resident, budget));
  }
  return best;
}

/// As many of the first groups as leave room for the ring.
double prefix(const AccessPattern& pattern, std::size_t budget) {
  double best = std::numeric_limits<double>::infinity();
  std::vector<bool> resident(pattern.groups.size(), false);
  for (std::size_t i = 0; i < resident.size(); ++i) {
    best = std::min(best, measure(pattern, resident, budget));
    resident[i] = true;
  }
  return best;
}

double even(const AccessPattern& pattern, std::size_t budget) {
  return measure(pattern, plan_residency(pattern.groups, budget, kPrefetch).resident, budget);
}

}  // namespace

TEST(placement_is_near_the_best_there_is) {
  double worst = 1, against_prefix = 0, against_even = 0;
  for (int seed = 1; seed <= kCases; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const AccessPattern pattern = random_pattern(random, random.between(6, 9));
    const std::size_t budget =
        std::max<std::size_t>(largest(pattern), total(pattern) * random.between(20, 80) / 100);
    const Placement placed = sim::place_by_time(pattern, budget, kPrefetch);
    EXPECT_EQ(placed.seconds, measure(pattern, placed.resident, budget));
    const double best = exhaustive(pattern, budget);
    worst = std::max(worst, placed.seconds / best);
    against_prefix += prefix(pattern, budget) / placed.seconds / kCases;
    against_even += even(pattern, budget) / placed.seconds / kCases;
    EXPECT(placed.seconds <= 1.02 * best);
    EXPECT(placed.seconds <= even(pattern, budget) * (1 + 1e-6));
  }
  std::printf("worst / best of all %.4f; prefix / ours %.3f, even / ours %.3f on average\n", worst,
              against_prefix, against_even);
  EXPECT(against_prefix > 1.02);
  EXPECT(against_even > 1.02);
}

// Where a long stretch of little compute follows one of much (a decoder's convolutions after its blocks), it
// is the former that residents help, and a prefix has the wrong ones.
TEST(placement_of_many_groups_keeps_those_of_little_compute) {
  AccessPattern pattern;
  pattern.bytes_per_second = 10e9;
  pattern.latency = 6e-6;
  constexpr std::size_t kGroups = 300;
  for (std::uint32_t i = 0; i < kGroups; ++i) {
    pattern.groups.push_back({.bytes = 8 * kMiB});
    const double copy = 8.0 * kMiB / pattern.bytes_per_second;
    pattern.steps.push_back({i, i < kGroups / 2 ? 2 * copy : 0.1 * copy, true});
  }
  const std::size_t budget = total(pattern) * 2 / 5;
  const Placement placed = sim::place_by_time(pattern, budget, kPrefetch);
  double compute = 0;
  for (const sim::Step& step : pattern.steps) compute += step.compute_seconds;
  std::printf("300 groups: %.3f of the compute; prefix %.3f, even %.3f\n", placed.seconds / compute,
              prefix(pattern, budget) / compute, even(pattern, budget) / compute);
  EXPECT(placed.seconds < 1.06 * compute);
  EXPECT(prefix(pattern, budget) > 1.2 * compute);
  EXPECT(even(pattern, budget) > 1.1 * compute);
}

// Masters of another type than the weights on the device: what they take there is not what has to travel.
TEST(placement_takes_what_copies_read_for_their_time) {
  Random random(3);
  for (int i = 0; i < kCases; ++i) {
    AccessPattern pattern = random_pattern(random, random.between(6, 9));
    const std::size_t budget = total(pattern) * 3 / 5;
    AccessPattern wide = pattern;
    for (const GroupTraits& group : pattern.groups)
      wide.copy_bytes.push_back(2.0 * static_cast<double>(group.bytes));
    pattern.bytes_per_second /= 2;
    const Placement narrow_bus = sim::place_by_time(pattern, budget, kPrefetch);
    const Placement wide_masters = sim::place_by_time(wide, budget, kPrefetch);
    EXPECT(wide_masters.resident == narrow_bus.resident);
    EXPECT(std::abs(wide_masters.seconds - narrow_bus.seconds) < 1e-9 * narrow_bus.seconds);
  }
}

TEST(placement_keeps_what_a_round_uses_most) {
  // A round of three models: each group of the first and the last is used once, of the second 8 times, and
  // some are never used.
  AccessPattern pattern;
  pattern.bytes_per_second = 10e9;
  pattern.latency = 6e-6;
  pattern.groups.assign(60, {.bytes = 8 * kMiB});
  const double seconds = 0.3 * 8 * kMiB / 10e9;
  const auto call = [&](std::uint32_t begin, std::uint32_t end) {
    for (std::uint32_t i = begin; i < end; ++i) pattern.steps.push_back({i, seconds, true});
  };
  call(0, 20);
  for (int step = 0; step < 8; ++step) call(20, 40);
  call(40, 50);
  for (const std::size_t groups : {12, 18, 24}) {
    const std::size_t budget = groups * 8 * kMiB;
    const Placement placed = sim::place_by_time(pattern, budget, kPrefetch);
    std::size_t of_denoiser = 0, of_others = 0, never_used = 0;
    for (std::size_t i = 0; i < 60; ++i) {
      if (placed.resident[i]) ++(i >= 50 ? never_used : i >= 20 && i < 40 ? of_denoiser : of_others);
    }
    EXPECT(of_denoiser + 6 >= std::min<std::size_t>(groups, 20));
    EXPECT(of_others <= (groups > 20 ? groups - 20 : 0));
    EXPECT(never_used == 0);
    EXPECT(placed.seconds < 0.8 * even(pattern, budget));
  }
}

}  // namespace dynswap::test
