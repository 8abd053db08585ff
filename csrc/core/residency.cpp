#include "core/residency.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "core/amount.h"
#include "core/check.h"

namespace dynswap {

namespace {

using Sizes = std::vector<std::size_t>;

std::size_t sum(const Sizes& bytes) { return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}); }

std::size_t largest(const Sizes& bytes) {
  return bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
}

/// The sizes of the groups for which `those` holds.
template <class Those>
Sizes sizes(const Groups& groups, const Those& those) {
  Sizes bytes;
  for (const GroupTraits& group : groups) {
    if (std::invoke(those, group)) bytes.push_back(group.bytes);
  }
  return bytes;
}

/// The sizes of the groups that pass through the ring.
Sizes streamed_of(const Groups& groups, const std::vector<bool>& resident) {
  Sizes bytes;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (!resident[i] && !groups[i].by_use) bytes.push_back(groups[i].bytes);
  }
  return bytes;
}

constexpr std::size_t kSparePart = 4;  ///< the ring's spare room is at most this part of the residents

/// What a ring takes that holds any `depth` + 1 consecutive streamed groups, as they happen to be.
std::size_t ring_bytes(const Sizes& streamed, std::size_t depth) {
  const std::size_t n = streamed.size();
  const std::size_t length = depth + 1;
  if (length >= n) return sum(streamed);
  std::size_t window = 0;
  for (std::size_t i = 0; i < length; ++i) window += streamed[i];
  std::size_t widest = window;
  for (std::size_t i = 0; i < n; ++i) {
    window += streamed[(i + length) % n] - streamed[i];
    widest = std::max(widest, window);
  }
  return widest;
}

/// What a ring can use beyond that: in all, room for the `depth` + 1 largest groups and the next `depth`.
/// Groups of many sizes leave gaps, and time between them varies; measured on the virtual clock
/// (benchmarks/virtual_clock.py). Equal groups need none, and those that are nearly equal little.
std::size_t spare_room(Sizes streamed, std::size_t depth, std::size_t ring) {
  if (streamed.empty()) return 0;
  const std::size_t mean = sum(streamed) / streamed.size();
  const auto end_of = [&](std::size_t count) {
    return streamed.begin() + static_cast<std::ptrdiff_t>(std::min(count, streamed.size()));
  };
  std::partial_sort(streamed.begin(), end_of(2 * depth + 1), streamed.end(), std::greater<>());
  const std::size_t largest = streamed.front();
  const std::size_t held = std::accumulate(streamed.begin(), end_of(depth + 1), std::size_t{0});
  const std::size_t more = std::accumulate(end_of(depth + 1), end_of(2 * depth + 1), std::size_t{0});
  constexpr double kUneven = 8;  // all of it where the mean is an eighth under the largest
  const double uneven = kUneven * static_cast<double>(largest - mean) / static_cast<double>(largest);
  const std::size_t ample =
      held + static_cast<std::size_t>(std::min(uneven, 1.0) * static_cast<double>(more));
  return ample - std::min(ample, ring);
}

/// Adds to the residents a share of `those` groups spread evenly (error diffusion over bytes), at most
/// `quota` bytes in all.
template <class Those>
std::vector<bool> spread(const Groups& groups, std::vector<bool> resident, std::size_t quota,
                         const Those& those) {
  std::size_t used = 0, rest = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (resident[i])
      used += groups[i].bytes;
    else if (those(groups[i]))
      rest += groups[i].bytes;
  }
  if (rest == 0) return resident;
  const double share = std::min(1.0, static_cast<double>(quota - used) / static_cast<double>(rest));
  double owed = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (resident[i] || !those(groups[i])) continue;
    const std::size_t bytes = groups[i].bytes;
    owed += share * static_cast<double>(bytes);
    // Half a group of credit is enough: the bytes come out right over the whole model.
    if (bytes == 0 || (owed >= 0.5 * static_cast<double>(bytes) && used + bytes <= quota)) {
      resident[i] = true;
      used += bytes;
      owed -= static_cast<double>(bytes);
    }
  }
  return resident;
}

/// The most residents that leave room for a ring of `depth` + 1 groups.
///
/// Note [A larger budget never streams more]
/// What a budget has beyond the ring goes to residents, and a part of it to the ring's spare room until there
/// is enough of that. So both grow with the budget. Were the room given first, a budget that has just enough
/// for it would have fewer residents than a smaller one that has not; the same holds for groups that are
/// larger because the budget is (Layout::form_groups_within()).
std::optional<ResidencyPlan> fit(const Groups& groups, std::size_t budget, std::uint32_t depth) {
  std::vector<std::size_t> by_size(groups.size());
  std::size_t total = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    by_size[i] = i;
    total += groups[i].bytes;
  }
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](std::size_t a, std::size_t b) { return groups[a].bytes > groups[b].bytes; });

  std::optional<ResidencyPlan> best;
  std::vector<bool> forced(groups.size(), false);
  const auto consider = [&](std::size_t quota) {
    const std::vector<bool> resident = spread(groups, forced, quota, [](const GroupTraits&) { return true; });
    const Sizes streamed = streamed_of(groups, resident);
    const std::size_t used = total - sum(streamed);
    const std::size_t ring = ring_bytes(streamed, depth);
    const std::size_t spare = std::min(used / kSparePart, spare_room(streamed, depth, ring));
    if (used + ring + spare > budget) return false;
    if (!best || used > best->resident_bytes) best = ResidencyPlan{resident, used, ring, depth};
    return true;
  };
  // Keeping the few largest groups can shrink the ring by more than they take. Sizes repeat, so only the
  // places where the size changes matter, and the first few of them.
  constexpr std::size_t kMostForced = 16;
  std::size_t least = 0;
  for (std::size_t count = 0; count <= std::min(kMostForced, groups.size()); ++count) {
    if (count > 0) {
      forced[by_size[count - 1]] = true;
      least += groups[by_size[count - 1]].bytes;
    }
    std::size_t low = least;
    std::size_t high = budget;
    if (low > high) break;
    consider(low);
    // What fits is not quite monotonic in the quota (the ring depends on which groups are left), so the
    // search keeps every quota that fits, not only the last.
    for (int step = 0; step < 24 && low < high; ++step) {
      const std::size_t quota = low + (high - low + 1) / 2;
      if (consider(quota)) {
        low = quota;
      } else {
        high = quota - 1;
      }
    }
  }
  return best;
}

/// The plan for groups that are alike but for their sizes.
ResidencyPlan plan_alike(const Groups& groups, std::size_t budget, std::uint32_t prefetch) {
  const std::vector<bool> none(groups.size(), false);
  const Sizes bytes = streamed_of(groups, none);
  const std::size_t total = sum(bytes), least = largest(bytes);
  if (budget == 0) return {none, 0, ring_bytes(bytes, prefetch), prefetch};
  if (total <= budget) return {std::vector<bool>(groups.size(), true), total, 0, prefetch};
  if (budget < least) {
    throw BudgetError("a budget of " + amount(budget) + " cannot hold the largest group of weights; the " +
                          "smallest budget that works is " + amount(least),
                      least);
  }
  if (prefetch == 0) {
    auto plan = fit(groups, budget, 0);  // the largest group fits, so something does
    plan->arena_bytes = budget - plan->resident_bytes;
    return *plan;
  }
  for (std::uint32_t depth = prefetch; depth > 0; --depth) {
    auto plan = fit(groups, budget, depth);
    if (!plan) continue;
    // Whatever the residents leave, the ring may use: it lets the copies run ahead further.
    plan->arena_bytes = std::min(budget - plan->resident_bytes, total - plan->resident_bytes);
    return *plan;
  }
  // Where some group leaves no room for the next one, room is worth more than residents.
  return {none, 0, budget, 0};
}

/// With the groups that have `trait` resident, and the others planned by `plan` in what these leave.
template <class Plan>
ResidencyPlan plan_around(bool GroupTraits::* trait, const Plan& plan, const Groups& groups,
                          std::size_t budget, std::uint32_t prefetch) {
  const std::size_t kept = sum(sizes(groups, trait));
  ResidencyPlan whole = solve_without(trait, groups, [&](const Groups& others) {
    return plan(others, budget > 0 ? budget - kept : 0, prefetch);
  });
  whole.resident_bytes += kept;
  return whole;
}

/// The plan for groups of which none is kept or by use. Where the budget has no room for the tiny ones and
/// the largest of the others, they are like others.
ResidencyPlan plan_with_tiny(const Groups& groups, std::size_t budget, std::uint32_t prefetch) {
  const Sizes others = sizes(groups, std::not_fn(&GroupTraits::tiny));
  const std::size_t least = sum(sizes(groups, &GroupTraits::tiny)) + largest(others);
  if (others.empty() || (budget > 0 && budget < least)) return plan_alike(groups, budget, prefetch);
  return plan_around(&GroupTraits::tiny, plan_alike, groups, budget, prefetch);
}

/// The plan for groups of which none is by use.
ResidencyPlan plan_in_order(const Groups& groups, std::size_t budget, std::uint32_t prefetch) {
  return plan_around(&GroupTraits::keep, plan_with_tiny, groups, budget, prefetch);
}

}  // namespace

std::size_t least_budget(const Groups& groups) {
  std::size_t kept = 0, ordered = 0, by_use = 0;
  for (const GroupTraits& group : groups) {
    if (group.keep && !group.by_use) {
      kept += group.bytes;
      continue;
    }
    std::size_t& most = group.by_use ? by_use : ordered;
    most = std::max(most, group.bytes);
  }
  return kept + ordered + by_use;
}

ResidencyPlan plan_residency(const Groups& groups, std::size_t budget, std::uint32_t prefetch) {
  const Sizes experts = sizes(groups, &GroupTraits::by_use);
  const std::size_t expert_bytes = sum(experts), one = largest(experts);
  if (expert_bytes == 0) return plan_in_order(groups, budget, prefetch);
  std::size_t cache = std::min((std::size_t{prefetch} + 1) * one, expert_bytes);
  if (budget > 0) {
    const std::size_t smallest = least_budget(groups);
    if (budget < smallest) {
      throw BudgetError("a budget of " + amount(budget) +
                            " cannot hold the largest group of weights and the largest " +
                            "expert; the smallest budget that works is " + amount(smallest),
                        smallest);
    }
    cache = std::max(one, std::min(cache, (budget - (smallest - one)) / 2));
    const std::size_t ordered_bytes = sum(sizes(groups, std::not_fn(&GroupTraits::by_use)));
    if (budget > ordered_bytes) cache = std::max(cache, budget - ordered_bytes);
    cache = std::min(cache, expert_bytes);
  }
  ResidencyPlan plan = solve_without(&GroupTraits::by_use, groups, [&](const Groups& ordered) {
    return plan_in_order(ordered, budget > 0 ? budget - cache : 0, prefetch);
  });
  if (experts.size() == groups.size()) plan.depth = 0;  // nothing has an order to be ahead in
  // What the ordered groups cannot use is the cache's too.
  plan.cache_bytes =
      budget > 0 ? std::min(budget - plan.resident_bytes - plan.arena_bytes, expert_bytes) : cache;
  return plan;
}

std::vector<bool> residents_within(std::size_t most, const Groups& groups) {
  std::vector<bool> resident;
  for (const GroupTraits& group : groups) resident.push_back(group.keep);
  most = std::max(most, sum(sizes(groups, &GroupTraits::keep)));
  for (const bool on_device : {true, false}) {
    resident = spread(groups, std::move(resident), most, [&](const GroupTraits& group) {
      return !group.by_use && group.on_device == on_device;
    });
  }
  return resident;
}

ResidencyPlan residency_of(std::vector<bool> resident, const Groups& groups, std::size_t cache_bytes,
                           std::size_t budget, std::uint32_t prefetch) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    resident[i] = resident[i] && !groups[i].by_use;
    kept += resident[i] ? groups[i].bytes : 0;
  }
  const Sizes streamed = streamed_of(groups, resident), experts = sizes(groups, &GroupTraits::by_use);
  const std::size_t least_cache =
      experts.empty() ? 0 : std::min(budget, std::max(cache_bytes, largest(experts)));
  const std::size_t rest = budget - least_cache;
  if (kept + largest(streamed) > rest) {
    throw BudgetError("a budget of " + amount(rest) + " cannot hold residents of " + amount(kept) +
                          " and a group of " + amount(largest(streamed)),
                      kept + largest(streamed));
  }
  const std::size_t arena = std::min(rest - kept, sum(streamed));
  std::uint32_t depth = prefetch;
  while (depth > 0 && ring_bytes(streamed, depth) > arena) --depth;
  return {std::move(resident), kept, arena, depth, std::min(budget - kept - arena, sum(experts))};
}

}  // namespace dynswap
