// Which groups stay: any budget works or is refused with the smallest that does, and residents are strided.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "core/residency.h"
#include "random.h"

namespace dynswap::test {

namespace {

using Sizes = std::vector<std::size_t>;

/// Groups in an order that differ in nothing else.
ResidencyPlan plan_of(const Sizes& bytes, std::size_t budget, std::uint32_t prefetch) {
  Groups groups;
  for (const std::size_t size : bytes) groups.push_back({.bytes = size});
  return plan_residency(groups, budget, prefetch);
}

std::size_t total(const Sizes& bytes) { return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}); }

Sizes streamed(const Sizes& bytes, const ResidencyPlan& plan) {
  Sizes sizes;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (!plan.resident[i]) sizes.push_back(bytes[i]);
  }
  return sizes;
}

/// The most bytes of `length` consecutive streamed groups, around the end too.
std::size_t widest(const Sizes& sizes, std::size_t length) {
  std::size_t most = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::size_t window = 0;
    for (std::size_t k = 0; k < std::min(length, sizes.size()); ++k) window += sizes[(i + k) % sizes.size()];
    most = std::max(most, window);
  }
  return most;
}

std::size_t count(const std::vector<bool>& flags) {
  return static_cast<std::size_t>(std::count(flags.begin(), flags.end(), true));
}

}  // namespace

TEST(residency_no_budget_means_the_ring_alone) {
  const Sizes bytes{10, 20, 30, 40};
  const ResidencyPlan plan = plan_of(bytes, 0, 1);
  EXPECT_EQ(count(plan.resident), 0u);
  EXPECT_EQ(plan.arena_bytes, 70u);  // 30 + 40, the widest pair
  EXPECT_EQ(plan_of(bytes, 0, 0).arena_bytes, 40u);
  EXPECT_EQ(plan_of(bytes, 0, 9).arena_bytes, 100u);
}

TEST(residency_everything_stays_if_it_fits) {
  const Sizes bytes{10, 20, 30};
  for (const std::size_t budget : {60, 61, 1000}) {
    const ResidencyPlan plan = plan_of(bytes, budget, 2);
    EXPECT_EQ(count(plan.resident), 3u);
    EXPECT_EQ(plan.resident_bytes, 60u);
    EXPECT_EQ(plan.arena_bytes, 0u);
  }
}

TEST(residency_a_budget_under_the_largest_group_names_the_smallest) {
  const Sizes bytes{10, 50, 30};
  EXPECT_THROWS(plan_of(bytes, 49, 2), BudgetError);
  try {
    plan_of(bytes, 1, 2);
    EXPECT(false);
  } catch (const BudgetError& error) {
    EXPECT_EQ(error.smallest_bytes(), 50u);
    EXPECT(std::string(error.what()).find("50") != std::string::npos);
  }
  EXPECT_EQ(plan_of(bytes, 50, 2).arena_bytes, 50u);
}

TEST(residency_any_budget_from_the_largest_group_on_works) {
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    Random random(seed);
    Sizes bytes(random.between(1, 40));
    const std::size_t typical = std::size_t{1} << random.between(2, 10);
    for (std::size_t& size : bytes) size = random.chance(0.5) ? typical : random.between(1, 3 * typical);
    if (random.chance(0.3)) bytes[random.below(bytes.size())] = 10 * typical;
    const std::size_t largest = *std::max_element(bytes.begin(), bytes.end());
    const auto prefetch = static_cast<std::uint32_t>(random.below(5));
    const std::size_t budget = random.chance(0.2) ? largest : random.between(largest, 2 * total(bytes));
    const ResidencyPlan plan = plan_of(bytes, budget, prefetch);

    EXPECT_EQ(plan.resident.size(), bytes.size());
    const Sizes sizes = streamed(bytes, plan);
    EXPECT_EQ(plan.resident_bytes, total(bytes) - total(sizes));
    EXPECT(plan.resident_bytes + plan.arena_bytes <= budget);
    EXPECT(plan.depth <= prefetch);
    // Wherever the consumer is, its group and `depth` more are there at one time.
    EXPECT(widest(sizes, plan.depth + 1) <= plan.arena_bytes);
  }
}

TEST(residency_equal_groups_leave_just_the_ring) {
  constexpr std::size_t kSize = 100;
  const Sizes bytes(40, kSize);
  for (std::size_t budget = 3 * kSize; budget < 40 * kSize; budget += 70) {
    const ResidencyPlan plan = plan_of(bytes, budget, 2);
    EXPECT_EQ(plan.depth, 2u);
    EXPECT_EQ(count(plan.resident), budget / kSize - 3);
  }
}

TEST(residency_is_strided) {
  const Sizes bytes(48, 100);
  for (const std::size_t residents : {4, 12, 16, 24}) {
    const ResidencyPlan plan = plan_of(bytes, (residents + 3) * 100, 2);
    EXPECT_EQ(count(plan.resident), residents);
    const std::size_t n = bytes.size();
    std::size_t longest = 0;
    for (std::size_t start = 0; start < n; ++start) {
      std::size_t run = 0;
      while (run < n && !plan.resident[(start + run) % n]) ++run;
      longest = std::max(longest, run);
    }
    // Evenly spread, no run of streamed groups is much longer than the average.
    const std::size_t average = (n - residents) / residents;
    EXPECT(longest <= average + average / 2 + 1);
  }
}

}  // namespace dynswap::test
