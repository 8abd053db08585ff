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

std::size_t sum(const std::vector<std::size_t>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
}

constexpr std::size_t kSparePart = 4;  ///< the ring's spare room is at most this part of the residents

/// What a ring takes that holds any `depth` + 1 consecutive streamed groups, as they happen to be.
std::size_t ring_bytes(const std::vector<std::size_t>& bytes, const std::vector<bool>& resident,
                       std::size_t depth) {
  std::vector<std::size_t> streamed;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (!resident[i]) streamed.push_back(bytes[i]);
  }
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
std::size_t spare_room(const std::vector<std::size_t>& bytes, const std::vector<bool>& resident,
                       std::size_t depth, std::size_t ring) {
  std::vector<std::size_t> streamed;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (!resident[i]) streamed.push_back(bytes[i]);
  }
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

/// The `forced` largest groups, and of the others a share spread evenly (error diffusion over bytes), at
/// most `quota` bytes in all. Nothing if the forced ones alone exceed it.
std::optional<std::vector<bool>> spread(const std::vector<std::size_t>& bytes,
                                        const std::vector<std::size_t>& by_size, std::size_t forced,
                                        std::size_t quota) {
  std::vector<bool> resident(bytes.size(), false);
  std::size_t used = 0;
  for (std::size_t i = 0; i < forced; ++i) {
    resident[by_size[i]] = true;
    used += bytes[by_size[i]];
  }
  if (used > quota) return std::nullopt;
  const std::size_t rest = sum(bytes) - used;
  if (rest == 0) return resident;
  const double share = std::min(1.0, static_cast<double>(quota - used) / static_cast<double>(rest));
  double owed = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (resident[i]) continue;
    owed += share * static_cast<double>(bytes[i]);
    // Half a group of credit is enough: the bytes come out right over the whole model.
    if (bytes[i] == 0 || (owed >= 0.5 * static_cast<double>(bytes[i]) && used + bytes[i] <= quota)) {
      resident[i] = true;
      used += bytes[i];
      owed -= static_cast<double>(bytes[i]);
    }
  }
  return resident;
}

std::size_t bytes_of(const std::vector<std::size_t>& bytes, const std::vector<bool>& resident) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) total += resident[i] ? bytes[i] : 0;
  return total;
}

/// The most residents that leave room for a ring of `depth` + 1 groups.
///
/// Note [A larger budget never streams more]
/// What a budget has beyond the ring goes to residents, and a part of it to the ring's spare room until there
/// is enough of that. So both grow with the budget. Were the room given first, a budget that has just enough
/// for it would have fewer residents than a smaller one that has not; the same holds for groups that are
/// larger because the budget is (Engine::form_groups_within()).
std::optional<ResidencyPlan> fit(const std::vector<std::size_t>& bytes, std::size_t budget,
                                 std::uint32_t depth) {
  std::vector<std::size_t> by_size(bytes.size());
  std::iota(by_size.begin(), by_size.end(), std::size_t{0});
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](std::size_t a, std::size_t b) { return bytes[a] > bytes[b]; });

  std::optional<ResidencyPlan> best;
  const auto consider = [&](std::size_t forced, std::size_t quota) {
    auto resident = spread(bytes, by_size, forced, quota);
    if (!resident) return false;
    const std::size_t used = bytes_of(bytes, *resident);
    const std::size_t ring = ring_bytes(bytes, *resident, depth);
    const std::size_t spare = std::min(used / kSparePart, spare_room(bytes, *resident, depth, ring));
    if (used + ring + spare > budget) return false;
    if (!best || used > best->resident_bytes) best = ResidencyPlan{*resident, used, ring, depth};
    return true;
  };
  // Keeping the few largest groups can shrink the ring by more than they take. Sizes repeat, so only the
  // places where the size changes matter, and the first few of them.
  constexpr std::size_t kMostForced = 16;
  std::size_t least = 0;
  for (std::size_t forced = 0; forced <= std::min(kMostForced, bytes.size()); ++forced) {
    if (forced > 0) least += bytes[by_size[forced - 1]];
    std::size_t low = least;
    std::size_t high = budget;
    if (low > high) break;
    consider(forced, low);
    // What fits is not quite monotonic in the quota (the ring depends on which groups are left), so the
    // search keeps every quota that fits, not only the last.
    for (int step = 0; step < 24 && low < high; ++step) {
      const std::size_t quota = low + (high - low + 1) / 2;
      if (consider(forced, quota)) {
        low = quota;
      } else {
        high = quota - 1;
      }
    }
  }
  return best;
}

}  // namespace

ResidencyPlan plan_residency(const std::vector<std::size_t>& bytes, std::size_t budget,
                             std::uint32_t prefetch) {
  const std::size_t total = sum(bytes);
  const std::vector<bool> none(bytes.size(), false);
  if (budget == 0) return {none, 0, ring_bytes(bytes, none, prefetch), prefetch};
  if (total <= budget) return {std::vector<bool>(bytes.size(), true), total, 0, prefetch};

  const std::size_t largest = *std::max_element(bytes.begin(), bytes.end());
  if (budget < largest) {
    throw BudgetError("a budget of " + amount(budget) + " cannot hold the largest group of weights; the " +
                          "smallest budget that works is " + amount(largest),
                      largest);
  }
  if (prefetch == 0) {
    auto plan = fit(bytes, budget, 0);  // the largest group fits, so something does
    plan->arena_bytes = budget - plan->resident_bytes;
    return *plan;
  }
  for (std::uint32_t depth = prefetch; depth > 0; --depth) {
    auto plan = fit(bytes, budget, depth);
    if (!plan) continue;
    // Whatever the residents leave, the ring may use: it lets the copies run ahead further.
    plan->arena_bytes = std::min(budget - plan->resident_bytes, total - plan->resident_bytes);
    return *plan;
  }
  // Where some group leaves no room for the next one, room is worth more than residents.
  return {none, 0, budget, 0};
}

ResidencyPlan plan_residency(const std::vector<std::size_t>& bytes, const std::vector<bool>& stay,
                             std::size_t budget, std::uint32_t prefetch) {
  std::vector<std::size_t> others;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (!stay[i]) others.push_back(bytes[i]);
  }
  if (others.empty() || others.size() == bytes.size()) return plan_residency(bytes, budget, prefetch);
  const std::size_t kept = bytes_of(bytes, stay);
  const std::size_t largest = *std::max_element(others.begin(), others.end());
  if (budget > 0 && budget < largest + kept) return plan_residency(bytes, budget, prefetch);
  ResidencyPlan plan = plan_residency(others, budget > 0 ? budget - kept : 0, prefetch);
  const std::vector<bool> resident = std::exchange(plan.resident, stay);
  for (std::size_t i = 0, other = 0; i < bytes.size(); ++i) {
    if (!stay[i]) plan.resident[i] = resident[other++];
  }
  plan.resident_bytes += kept;
  return plan;
}

ResidencyPlan plan_residency(const std::vector<std::size_t>& bytes, const std::vector<bool>& keep,
                             const std::vector<bool>& stay, std::size_t budget, std::uint32_t prefetch) {
  std::vector<std::size_t> others;
  std::vector<bool> others_stay;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (keep[i]) continue;
    others.push_back(bytes[i]);
    others_stay.push_back(stay[i]);
  }
  if (others.size() == bytes.size()) return plan_residency(bytes, stay, budget, prefetch);
  const std::size_t kept = bytes_of(bytes, keep);
  if (others.empty()) return {keep, kept, 0, prefetch};
  ResidencyPlan plan = plan_residency(others, others_stay, budget > 0 ? budget - kept : 0, prefetch);
  const std::vector<bool> resident = std::exchange(plan.resident, keep);
  for (std::size_t i = 0, other = 0; i < bytes.size(); ++i) {
    if (!keep[i]) plan.resident[i] = resident[other++];
  }
  plan.resident_bytes += kept;
  return plan;
}

std::vector<bool> residents_within(std::size_t most, const std::vector<std::size_t>& bytes,
                                   const std::vector<bool>& stay, const std::vector<bool>& on_device,
                                   const std::vector<bool>& by_use) {
  std::vector<bool> chosen = stay;
  std::size_t room = most - std::min(most, bytes_of(bytes, stay));
  for (const bool those_on_device : {true, false}) {
    std::vector<std::size_t> places, sizes;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (chosen[i] || by_use[i] || on_device[i] != those_on_device) continue;
      places.push_back(i);
      sizes.push_back(bytes[i]);
    }
    const std::vector<bool> share = *spread(sizes, {}, 0, room);
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (!share[i]) continue;
      chosen[places[i]] = true;
      room -= sizes[i];
    }
  }
  return chosen;
}

ResidencyPlan residency_of(const std::vector<bool>& resident, const std::vector<std::size_t>& bytes,
                           std::size_t budget, std::uint32_t prefetch) {
  const std::size_t kept = bytes_of(bytes, resident);
  const std::size_t streamed = sum(bytes) - kept;
  std::size_t largest = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) largest = std::max(largest, resident[i] ? 0 : bytes[i]);
  if (kept + largest > budget) {
    throw BudgetError("a budget of " + amount(budget) + " cannot hold residents of " + amount(kept) +
                          " and a group of " + amount(largest),
                      kept + largest);
  }
  const std::size_t arena = std::min(budget - kept, streamed);
  std::uint32_t depth = prefetch;
  while (depth > 0 && ring_bytes(bytes, resident, depth) > arena) --depth;
  return {resident, kept, arena, depth};
}

}  // namespace dynswap
