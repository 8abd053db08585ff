// Engine: which groups are resident, and how large groups are for that.
#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include "core/amount.h"
#include "core/engine.h"
#include "core/protection.h"
#include "core/residency.h"

namespace dynswap {

namespace {

constexpr unsigned kMostHalvings = 8;  ///< of the usual groups

}  // namespace

/// What a budget has to hold: what is kept, the largest of the other groups in an order, and the largest by
/// use.
std::size_t Engine::least_budget(const std::vector<std::size_t>& bytes) const {
  std::size_t kept = 0, ordered = 0, by_use = 0;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    if (groups_[id].keep) {
      kept += bytes[id];
      continue;
    }
    std::size_t& largest = groups_[id].by_use ? by_use : ordered;
    largest = std::max(largest, bytes[id]);
  }
  return kept + ordered + by_use;
}

bool Engine::holds_all() {
  DYNSWAP_CHECK(!arranged_, "it is asked before arrange()");
  if (options_.budget == 0 || weights_.empty()) return false;
  join_units();
  Units all = units();
  const Grouping usual = grouping(all);
  const std::vector<std::size_t> bytes = form_groups(std::move(all), usual, {});
  return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}) <= options_.budget;
}

void Engine::arrange(const std::vector<std::vector<WeightId>>& on_device) {
  DYNSWAP_CHECK(!arranged_, "arrange() is called once, and before plan()");
  arranged_ = true;
  if (weights_.empty()) return;
  join_units();
  const std::size_t budget = PROTECTED(cap_respected) ? options_.budget : 2 * options_.budget;
  std::vector<std::size_t> bytes;
  if (const std::optional<PriorPlan>& prior = options_.prior) {
    bytes = take_groups(*prior);
    residency_ = with_cache(prior->resident, bytes, flags(&Group::by_use), prior->cache_bytes, budget,
                            options_.prefetch);
  } else {
    std::vector<std::vector<WeightId>> together;
    if (budget > 0) together = groups_to_keep(on_device);
    bytes = form_groups_and_residents(together, budget);
    // What is no resident after all need not keep its group.
    if (std::erase_if(together, [this](const std::vector<WeightId>& group) {
          return !residency_.residency.resident[weights_[group.front()].group];
        }) > 0)
      bytes = form_groups_and_residents(together, budget);
  }
  stats_.groups = groups_.size();
  stats_.weight_bytes = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
  // When all residents have given way, no more is left than with budget="minimum".
  if (options_.residents_give_way) {
    const std::vector<bool> none(bytes.size(), false);
    const PlanWithCache least =
        plan_with_cache(bytes, none, none, flags(&Group::by_use), 0, options_.prefetch);
    residency_.residency.arena_bytes =
        std::min(residency_.residency.arena_bytes, least.residency.arena_bytes);
  }
  half_life_ = half_life(residency_.cache_bytes, bytes, flags(&Group::by_use));
}

std::vector<bool> Engine::flags(bool Group::* flag) const {
  std::vector<bool> flags;
  for (const Group& group : groups_) flags.push_back(group.*flag);
  return flags;
}

/// Of the groups in an order: what a pass copies.
Engine::Cost Engine::cost_of_pass(const std::vector<std::size_t>& bytes) const {
  Cost cost;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    if (groups_[id].by_use || residency_.residency.resident[id]) continue;
    cost.bytes += bytes[id];
    cost.overhead += backend_->traits().copy_overhead_bytes;
  }
  return cost;
}

/// Forms groups within the budget, and chooses residents. Returns the groups' sizes.
///
/// Smaller groups make a smaller ring, which leaves more to residents, and more copies. Of the sizes with
/// which the most groups are ahead of the one in use, it takes the one that costs least. The sizes that it
/// tries do not depend on the budget (Note [A larger budget never streams more]).
std::vector<std::size_t> Engine::form_groups_within(std::size_t budget,
                                                    const std::vector<std::vector<WeightId>>& on_device) {
  const Units all = units();
  std::vector<std::size_t> bytes;
  const auto plan_with = [&](const Grouping& grouping, const std::vector<std::vector<WeightId>>& groups) {
    bytes = form_groups(all, grouping, groups);
    if (options_.budget > 0 && grouping.enough > 1 && least_budget(bytes) > options_.budget) return false;
    check_kept(bytes, budget);
    residency_ = plan_with_cache(bytes, flags(&Group::keep), flags(&Group::tiny), flags(&Group::by_use),
                                 budget, options_.prefetch);
    return true;
  };
  std::optional<unsigned> best;
  std::uint32_t best_depth = 0;
  std::size_t best_cost = 0;
  unsigned halvings = 0;
  for (bool can_cost_less = true; can_cost_less && halvings <= kMostHalvings; ++halvings) {
    if (!plan_with(grouping(all, halvings), on_device)) continue;
    const ResidencyPlan& plan = residency_.residency;
    const Cost cost = cost_of_pass(bytes);
    if (!best || plan.depth > best_depth ||
        (plan.depth == best_depth && cost.bytes + cost.overhead < best_cost)) {
      best = halvings;
      best_depth = plan.depth;
      best_cost = cost.bytes + cost.overhead;
    }
    // Half as large, they begin twice as often, and no more than the ring can be saved.
    can_cost_less = plan.depth < options_.prefetch || cost.overhead < plan.arena_bytes;
  }
  if (!best) {
    plan_with({1, 0, 0}, {});  // as small as can be: what does not fit then never will
  } else if (*best + 1 != halvings) {
    plan_with(grouping(all, *best), on_device);
  }
  return bytes;
}

/// Forms groups and chooses residents, where those of `on_device` are groups and residents already. Returns
/// their sizes.
std::vector<std::size_t> Engine::form_groups_and_residents(
    const std::vector<std::vector<WeightId>>& on_device, std::size_t budget) {
  const std::vector<std::size_t> bytes = form_groups_within(budget, on_device);
  const std::vector<bool> keep = flags(&Group::keep), tiny = flags(&Group::tiny);
  const std::vector<bool> is_on_device = flags(&Group::on_device);
  if (std::find(is_on_device.begin(), is_on_device.end(), true) == is_on_device.end()) return bytes;

  // As many of them stay as leave the usual room to run ahead. If the usual residents are more, others fill
  // up, where there is room.
  const std::vector<bool> usual = residency_.residency.resident;
  std::vector<bool> stay;
  std::size_t usual_bytes = 0, on_device_bytes = 0;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    stay.push_back(keep[id] || (tiny[id] && usual[id]));
    usual_bytes += usual[id] ? bytes[id] : 0;
    on_device_bytes += stay[id] || is_on_device[id] ? bytes[id] : 0;
  }
  const std::vector<bool> by_use = flags(&Group::by_use);
  const auto keeps = [&](std::size_t most) {
    try {
      const PlanWithCache plan = with_cache(residents_within(most, bytes, stay, is_on_device, by_use), bytes,
                                            by_use, residency_.cache_bytes, budget, options_.prefetch);
      if (plan.residency.depth < residency_.residency.depth) return false;
      residency_ = plan;
      return true;
    } catch (const BudgetError&) {
      return false;
    }
  };
  std::size_t low = usual_bytes, high = std::max(on_device_bytes, usual_bytes);
  if (keeps(high)) return bytes;
  // And nothing else, for which the ring would have to be larger.
  if (!keeps(low) && on_device_bytes <= usual_bytes) keeps(on_device_bytes);
  for (int step = 0; step < 24 && high - low > 1; ++step) {
    const std::size_t most = low + (high - low) / 2;
    (keeps(most) ? low : high) = most;
  }
  return bytes;
}

void Engine::check_kept(const std::vector<std::size_t>& bytes, std::size_t budget) const {
  std::size_t kept = 0, count = 0;
  bool shared = false;
  std::string names;
  constexpr std::size_t kMostNamed = 5;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    if (!groups_[id].keep) continue;
    kept += bytes[id];
    for (const WeightId weight : groups_[id].weights) {
      shared = shared || weights_[weight].shared;
      if (++count <= kMostNamed) names += (names.empty() ? "" : ", ") + weights_[weight].source->name;
    }
  }
  const std::size_t least = least_budget(bytes);
  if (kept == 0 || budget == 0 || least <= budget) return;
  if (count > kMostNamed) names += " and " + std::to_string(count - kMostNamed) + " more";
  throw BudgetError("a budget of " + amount(budget) + " does not hold the weights that " +
                        (shared ? "many modules share, or that keep= names (" : "keep= names (") + names +
                        "), which take " + amount(kept) +
                        ", and the largest group of the others; the smallest budget that works is " +
                        amount(least),
                    least);
}

void Engine::plan() {
  DYNSWAP_CHECK(!planned_, "plan() is called once");
  if (!arranged_) arrange();
  if (weights_.empty()) {
    planned_ = true;
    return;
  }
  const auto [residency, cache_bytes] = std::exchange(residency_, {});
  std::vector<bool> inherited;
  {
    const std::lock_guard lock(mutex_);
    for (const Group& group : groups_) inherited.push_back(group.home != nullptr);
  }
  Memory arena, cache;  // all or nothing
  std::vector<Memory> homes(groups_.size());
  try {
    if (residency.arena_bytes > 0) arena = backend_->allocate(residency.arena_bytes);
    if (cache_bytes > 0) cache = backend_->allocate(cache_bytes);
    for (GroupId id = 0; id < groups_.size(); ++id) {
      if (!residency.resident[id] || inherited[id]) continue;
      homes[id] = backend_->allocate(groups_[id].bytes);
    }
  } catch (...) {
    give_back_inherited();
    throw;
  }

  const std::lock_guard lock(mutex_);
  if (closed_) return;  // by another thread, meanwhile
  arena_memory_ = std::move(arena);
  cache_memory_ = std::move(cache);
  std::vector<Schedule::Group> streamed;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    Group& group = groups_[id];
    group.resident = residency.resident[id];
    if (!inherited[id]) group.home = std::move(homes[id]);
    if (group.resident) {
      ++stats_.resident_groups;
      cold_residents_ += inherited[id] ? 0 : 1;
    } else if (!group.by_use) {
      streamed.push_back(id);
    }
  }
  schedule_.prime(streamed);
  use_order_ = UseOrder(groups_.size());
  arena_ = Arena(residency.arena_bytes);
  cache_ = Arena(cache_bytes);
  stats_.resident_bytes = residency.resident_bytes;
  stats_.arena_bytes = residency.arena_bytes + cache_bytes;
  planned_bytes_ = std::max<std::size_t>(options_.budget, residency.resident_bytes + stats_.arena_bytes);
  stats_.depth = residency.depth;
  note_peak();
  planned_ = true;
}

}  // namespace dynswap
