// Layout: which groups are resident, and how large groups are for that.
#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/amount.h"
#include "core/check.h"
#include "core/layout.h"
#include "core/protection.h"

namespace dynswap {

namespace {

constexpr unsigned kMostHalvings = 8;  ///< of the usual groups

}  // namespace

std::size_t Layout::group_bytes() const noexcept {
  std::size_t total = 0;
  for (const Group& group : groups_) total += group.bytes;
  return total;
}

bool Layout::holds_all() {
  if (options_.budget == 0 || weights_.empty()) return false;
  join_units();
  Units all = units();
  const Grouping usual = grouping(all);
  form_groups(std::move(all), usual, {});
  return group_bytes() <= options_.budget;
}

void Layout::arrange(const std::vector<std::vector<WeightId>>& on_device) {
  if (weights_.empty()) return;
  join_units();
  const std::size_t budget = PROTECTED(cap_respected) ? options_.budget : 2 * options_.budget;
  if (const std::optional<PriorPlan>& prior = options_.prior; prior && !prior->resident.empty()) {
    take_groups(*prior);
    residency_ = residency_of(prior->resident, group_traits(), prior->cache_bytes, budget, options_.prefetch);
    return;
  }
  std::vector<std::vector<WeightId>> together;
  if (budget > 0) together = groups_to_keep(on_device);
  form_groups_and_residents(together, budget);
  // What is no resident after all need not keep its group.
  if (std::erase_if(together, [this](const std::vector<WeightId>& group) {
        return !residency_.resident[weights_[group.front()].group];
      }) > 0)
    form_groups_and_residents(together, budget);
}

/// Those of the groups `on_device` that can be groups of this plan too.
std::vector<std::vector<WeightId>> Layout::groups_to_keep(
    std::vector<std::vector<WeightId>> on_device) const {
  std::unordered_map<std::uint64_t, std::size_t> in_unit;  // how many weights
  for (const Weight& weight : weights_) ++in_unit[weight.unit];
  std::erase_if(on_device, [&](const std::vector<WeightId>& group) {
    if (group.empty() || !std::is_sorted(group.begin(), group.end())) return true;
    const WeightOptions& first = weights_[group.front()].options;
    std::unordered_map<std::uint64_t, std::size_t> here;
    for (const WeightId id : group) ++here[weights_[id].unit];
    return std::any_of(group.begin(), group.end(), [&](WeightId id) {
      const Weight& weight = weights_[id];
      const WeightOptions& options = weight.options;
      if (options.by_use || options.keep != first.keep || options.model != first.model) return true;
      // Its unit is needed at the same time: all of it is here, or it is not kept together.
      return options.at_once && here[weight.unit] != in_unit[weight.unit];
    });
  });
  return on_device;
}

/// What a pass copies, of the groups in an order.
Layout::Cost Layout::cost_of_pass() const {
  Cost cost;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    if (groups_[id].by_use || residency_.resident[id]) continue;
    cost.bytes += groups_[id].bytes;
    cost.overhead += traits_.copy_overhead_bytes;
  }
  return cost;
}

/// Forms groups within the budget, and chooses residents.
///
/// Smaller groups make a smaller ring, which leaves more to residents, and more copies. Of the sizes with
/// which the most groups are ahead of the one in use, it takes the one that costs least. The sizes that it
/// tries do not depend on the budget (Note [A larger budget never streams more]).
void Layout::form_groups_within(std::size_t budget, const std::vector<std::vector<WeightId>>& on_device) {
  const Units all = units();
  const auto form = [&](const Grouping& grouping, const std::vector<std::vector<WeightId>>& together) {
    form_groups(all, grouping, together);
    return options_.budget == 0 || least_budget(group_traits()) <= options_.budget;
  };
  const auto choose_residents = [&] {
    check_kept(budget);
    residency_ = plan_residency(group_traits(), budget, options_.prefetch);
  };
  std::optional<unsigned> best;
  std::uint32_t best_depth = 0;
  std::size_t best_cost = 0;
  unsigned halvings = 0;
  for (bool can_cost_less = true; can_cost_less && halvings <= kMostHalvings; ++halvings) {
    if (!form(grouping(all, halvings), on_device)) continue;
    choose_residents();
    const ResidencyPlan& plan = residency_;
    const Cost cost = cost_of_pass();
    if (!best || plan.depth > best_depth ||
        (plan.depth == best_depth && cost.bytes + cost.overhead < best_cost)) {
      best = halvings;
      best_depth = plan.depth;
      best_cost = cost.bytes + cost.overhead;
    }
    // Half as large, they begin twice as often, and no more than the ring can be saved.
    can_cost_less = plan.depth < options_.prefetch || cost.overhead < plan.arena_bytes;
  }
  if (best && *best + 1 == halvings) return;
  if (best) {
    form(grouping(all, *best), on_device);
  } else {
    form({1, 0, 0}, {});  // as small as can be: what does not fit then never will
  }
  choose_residents();
}

/// Forms groups and chooses residents, where those of `on_device` are groups and residents already.
void Layout::form_groups_and_residents(const std::vector<std::vector<WeightId>>& on_device,
                                       std::size_t budget) {
  form_groups_within(budget, on_device);
  Groups groups = group_traits();
  if (std::none_of(groups.begin(), groups.end(), std::mem_fn(&GroupTraits::on_device))) return;

  // As many of them stay as leave the usual room to run ahead. If the usual residents are more, others fill
  // up, where there is room. Tiny ones stay as in the usual plan.
  std::size_t usual_bytes = 0, on_device_bytes = 0;
  for (GroupId id = 0; id < groups.size(); ++id) {
    GroupTraits& group = groups[id];
    const bool usual = residency_.resident[id];
    group.keep = group.keep || (group.tiny && usual);
    usual_bytes += usual ? group.bytes : 0;
    on_device_bytes += group.keep || group.on_device ? group.bytes : 0;
  }
  const auto keeps = [&](std::size_t most) {
    try {
      ResidencyPlan plan = residency_of(residents_within(most, groups), groups, residency_.cache_bytes,
                                        budget, options_.prefetch);
      if (plan.depth < residency_.depth) return false;
      residency_ = std::move(plan);
      return true;
    } catch (const BudgetError&) {
      return false;
    }
  };
  std::size_t low = usual_bytes, high = std::max(on_device_bytes, usual_bytes);
  if (keeps(high)) return;
  // And nothing else, for which the ring would have to be larger.
  if (!keeps(low) && on_device_bytes <= usual_bytes) keeps(on_device_bytes);
  for (int step = 0; step < 24 && high - low > 1; ++step) {
    const std::size_t most = low + (high - low) / 2;
    (keeps(most) ? low : high) = most;
  }
}

void Layout::check_kept(std::size_t budget) const {
  std::size_t kept = 0, count = 0;
  bool shared = false;
  std::string names;
  constexpr std::size_t kMostNamed = 5;
  for (const Group& group : groups_) {
    if (!group.keep) continue;
    kept += group.bytes;
    for (const WeightId weight : group.weights) {
      shared = shared || weights_[weight].shared;
      if (++count <= kMostNamed) names += (names.empty() ? "" : ", ") + weights_[weight].source->name;
    }
  }
  const std::size_t least = least_budget(group_traits());
  if (kept == 0 || budget == 0 || least <= budget) return;
  if (count > kMostNamed) names += " and " + std::to_string(count - kMostNamed) + " more";
  throw BudgetError("a budget of " + amount(budget) + " does not hold the weights that " +
                        (shared ? "many modules share, or that keep= names (" : "keep= names (") + names +
                        "), which take " + amount(kept) +
                        ", and the largest group of the others; the smallest budget that works is " +
                        amount(least),
                    least);
}

}  // namespace dynswap
