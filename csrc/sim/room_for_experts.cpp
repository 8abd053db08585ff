#include "sim/room_for_experts.h"

#include <algorithm>
#include <utility>

#include "core/by_use.h"
#include "core/check.h"
#include "core/residency.h"
#include "sim/measure.h"

namespace dynswap::sim {

namespace {

constexpr std::size_t kSizes = 8;  ///< of the cache that are measured, in addition to the engine's own

std::vector<bool> in_order(const std::vector<bool>& flags, const std::vector<bool>& by_use) {
  std::vector<bool> ordered;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (!by_use[i]) ordered.push_back(flags[i]);
  }
  return ordered;
}

/// The flags of the groups in an order, at their places among all groups.
std::vector<bool> among_all(const std::vector<bool>& ordered, const std::vector<bool>& by_use) {
  std::vector<bool> flags(by_use.size(), false);
  for (std::size_t i = 0, at = 0; i < by_use.size(); ++i) {
    if (!by_use[i]) flags[i] = ordered[at++];
  }
  return flags;
}

}  // namespace

Placement place_by_time(const AccessPattern& pattern, const std::vector<bool>& keep,
                        const std::vector<bool>& by_use, std::size_t budget, std::uint32_t prefetch) {
  std::size_t expert_bytes = 0, largest_expert = 0, kept = 0;
  for (std::size_t i = 0; i < by_use.size(); ++i) {
    expert_bytes += by_use[i] ? pattern.bytes[i] : 0;
    largest_expert = std::max(largest_expert, by_use[i] ? pattern.bytes[i] : 0);
    kept += keep[i] ? pattern.bytes[i] : 0;
  }
  if (expert_bytes == 0) return place_by_time(pattern, keep, budget, prefetch);
  const auto seconds = [&](const Placement& placement) {
    return measure(pattern, placement.resident, by_use, placement.cache_bytes, budget, prefetch);
  };
  const std::vector<bool> none(by_use.size(), false);
  const PlanWithCache own = plan_with_cache(pattern.bytes, keep, none, by_use, budget, prefetch);
  Placement best{own.residency.resident, 0, own.cache_bytes};
  best.seconds = seconds(best);
  const auto consider = [&](std::vector<bool> resident, std::size_t cache) {
    Placement placement{std::move(resident), 0, cache};
    placement.seconds = seconds(placement);
    if (placement.seconds < best.seconds) best = std::move(placement);
  };

  const AccessPattern others = without(pattern, by_use);
  if (others.steps.empty()) return best;
  const std::vector<bool> kept_of_others = in_order(keep, by_use), stay(others.bytes.size(), false);
  const std::size_t most = std::min(budget, expert_bytes);
  for (std::size_t i = 0; i < kSizes && most > largest_expert; ++i) {
    const std::size_t cache = largest_expert + (most - largest_expert) * i / kSizes;
    if (budget - cache <= kept) break;
    try {
      const ResidencyPlan plan = plan_residency(others.bytes, kept_of_others, stay, budget - cache, prefetch);
      consider(among_all(plan.resident, by_use), cache);
    } catch (const BudgetError&) {
      break;  // a larger cache leaves less
    }
  }
  const Placement by_time = place_by_time(others, kept_of_others, budget - best.cache_bytes, prefetch);
  consider(among_all(by_time.resident, by_use), best.cache_bytes);
  return best;
}

}  // namespace dynswap::sim
