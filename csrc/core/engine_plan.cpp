// Engine: which weights travel together, where they lie in a group, which groups are resident.
#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include "core/align.h"
#include "core/amount.h"
#include "core/engine.h"
#include "core/protection.h"
#include "core/residency.h"

namespace dynswap {

namespace {

constexpr std::size_t kFewestGroups = 16;  ///< about so many, however small the model

/// Note [Tiny weights stay]: norms are often defined behind the large weights that they are used before. Were
/// they to travel with their neighbours by definition, those would be needed twice a pass, and often copied
/// twice. All together they are nothing beside the model, so they stay, if they are: units of less than this
/// part of a transfer, of all of them no more than that part of the model.
constexpr std::size_t kTinyPart = 32;

}  // namespace

Engine::Grouping Engine::preferred_grouping(const Units& units) const {
  std::size_t total = 0;
  for (const Weight& weight : weights_) total += weight.options.by_use ? 0 : weight.source->wanted_bytes();
  // A small model, or a small budget, is streamed all the same: then less is enough.
  const std::size_t ring = std::size_t{options_.prefetch} + 1;
  const std::size_t share = options_.budget > 0 ? options_.budget / (2 * ring) : total;
  Grouping grouping{std::min({options_.group_bytes, total / kFewestGroups, share}),
                    std::min(options_.split_bytes, options_.budget > 0 ? 2 * share : total), 0};
  const std::size_t tiny = grouping.enough / kTinyPart;
  const std::size_t alignment = backend_->weight_alignment();
  std::size_t tiny_total = 0;
  for (const std::vector<WeightId>& unit : units) {
    const WeightOptions& options = weights_[unit.front()].options;
    if (bytes_of(unit) > tiny || options.keep || options.by_use) continue;
    for (const WeightId id : unit) tiny_total += align_up(weights_[id].source->wanted_bytes(), alignment);
  }
  if (tiny_total <= total / kTinyPartOfModel) grouping.tiny = tiny;
  return grouping;
}

std::vector<std::size_t> Engine::form_groups(Units units, const Grouping& grouping,
                                             const std::vector<std::vector<WeightId>>& on_device) {
  // A unit's weights are used together, so a group holds whole units: small ones until there is enough
  // to be worth a transfer. Only a unit too large to travel at once is cut, and its small weights (a
  // bias) go with the weight before them. A unit that one call needs as a whole is one group, whatever its
  // size: cut, it could be given a budget that does not hold it. So is an expert. Around residents that are
  // there already, a group goes on.
  const auto [enough, too_large, tiny] = grouping;
  std::size_t largest = 0;
  for (const Weight& weight : weights_)
    largest = std::max<std::size_t>(largest, weight.options.by_use ? 0 : weight.source->wanted_bytes());
  const std::size_t small = std::max(enough / 4, largest / 16);
  groups_.clear();
  std::vector<bool> grouped(weights_.size(), false), in_tiny_unit(weights_.size(), false);
  for (const std::vector<WeightId>& group : on_device) {
    for (const WeightId id : group) grouped[id] = true;
  }
  std::size_t open_bytes = 0;
  bool open = false;
  std::size_t current = 0;  // the group that is open
  const auto append = [&](WeightId weight) {
    if (!open) {
      current = groups_.size();
      groups_.emplace_back().keep = weights_[weight].options.keep;
      open_bytes = 0;
      open = true;
    }
    groups_[current].weights.push_back(weight);
    open_bytes += weights_[weight].source->wanted_bytes();
  };
  std::optional<std::size_t> tinies;
  for (std::vector<WeightId>& unit : units) {
    const std::size_t bytes_of_unit = bytes_of(unit);
    const WeightOptions& options = weights_[unit.front()].options;
    if (options.by_use) {
      groups_.emplace_back().weights = std::move(unit);
      continue;
    }
    if (bytes_of_unit <= tiny && !options.keep) {
      for (const WeightId weight : unit) {
        in_tiny_unit[weight] = true;
        if (grouped[weight]) continue;
        if (!tinies) {
          tinies = groups_.size();
          groups_.emplace_back().tiny = true;
        }
        groups_[*tinies].weights.push_back(weight);
      }
      continue;
    }
    std::erase_if(unit, [&grouped](WeightId weight) { return grouped[weight]; });
    if (unit.empty()) continue;
    if (open) {
      const WeightOptions& before = weights_[groups_[current].weights.back()].options;
      open = before.model == options.model && before.keep == options.keep;
    }
    const bool cut = bytes_of_unit > too_large && !options.at_once;
    for (const WeightId weight : unit) {
      const std::size_t bytes = weights_[weight].source->wanted_bytes();
      if (cut && open_bytes >= enough && bytes > small) open = false;
      append(weight);
    }
    if (open_bytes >= enough) open = false;
  }
  for (const std::vector<WeightId>& group : on_device) {
    Group& made = groups_.emplace_back();
    made.weights = group;
    made.on_device = true;
    made.keep = weights_[group.front()].options.keep;
    made.tiny = std::all_of(group.begin(), group.end(), [&](WeightId id) { return in_tiny_unit[id]; });
  }
  // Numbered in the order of their weights.
  for (Group& group : groups_) std::sort(group.weights.begin(), group.weights.end());
  std::stable_sort(groups_.begin(), groups_.end(),
                   [](const Group& a, const Group& b) { return a.weights.front() < b.weights.front(); });
  return lay_out_groups();
}

std::vector<std::size_t> Engine::take_groups(const PriorPlan& prior) {
  DYNSWAP_CHECK(prior.group_of.size() == weights_.size(), "the plan was made for other weights");
  groups_.clear();
  for (WeightId weight = 0; weight < weights_.size(); ++weight) {
    const GroupId id = prior.group_of[weight];
    DYNSWAP_CHECK(id <= groups_.size(), "groups are numbered in order");
    if (id == groups_.size()) groups_.emplace_back();
    groups_[id].weights.push_back(weight);
    groups_[id].keep = weights_[weight].options.keep;
  }
  DYNSWAP_CHECK(prior.resident.size() == groups_.size(), "the plan was made for other groups");
  return lay_out_groups();
}

std::vector<std::size_t> Engine::lay_out_groups() {
  std::vector<std::size_t> bytes;
  std::size_t weights = 0;
  for (const Group& group : groups_) weights += group.weights.size();
  DYNSWAP_CHECK(weights == weights_.size(), "each weight is in one group");
  for (GroupId id = 0; id < groups_.size(); ++id) {
    for (std::size_t part = 0; part < groups_[id].weights.size(); ++part) {
      weights_[groups_[id].weights[part]].group = id;
      weights_[groups_[id].weights[part]].part = part;
    }
    groups_[id].bytes = lay_out(groups_[id]);
    groups_[id].by_use = weights_[groups_[id].weights.front()].options.by_use;
    bytes.push_back(groups_[id].bytes);
  }
  return bytes;
}

/// Weights of one file that come one after the other lie as they do in the file: see Note [Neighbours are
/// read together].
std::vector<WeightId> Engine::in_file_order(std::vector<WeightId> ids) const {
  const auto file = [this](WeightId id) { return weights_[id].source->file.get(); };
  for (auto first = ids.begin(), last = first; first != ids.end(); first = last) {
    last = std::find_if(first, ids.end(), [&](WeightId id) { return file(id) != file(*first); });
    std::stable_sort(first, last, [this](WeightId a, WeightId b) {
      return weights_[a].source->offset < weights_[b].source->offset;
    });
  }
  return ids;
}

std::size_t Engine::lay_out(Group& group) {
  const std::size_t alignment = backend_->alignment();
  std::size_t end = 0;
  for (const WeightId id : in_file_order(group.weights)) {
    Weight& weight = weights_[id];
    std::size_t offset = align_up(end, backend_->weight_alignment());
    if (const auto phase = backend_->phase(*weight.source)) {
      offset += (alignment + *phase - offset % alignment) % alignment;
    }
    weight.offset = offset;
    end = offset + weight.source->wanted_bytes();
  }
  return std::max(align_up(end, alignment), alignment);
}

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
  const Grouping grouping = preferred_grouping(all);
  const std::vector<std::size_t> bytes = form_groups(std::move(all), grouping, {});
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
    residency_ = with_cache(prior->resident, bytes, by_use(), prior->cache_bytes, budget, options_.prefetch);
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
    const PlanWithCache least = plan_with_cache(bytes, none, none, by_use(), 0, options_.prefetch);
    residency_.residency.arena_bytes =
        std::min(residency_.residency.arena_bytes, least.residency.arena_bytes);
  }
  half_life_ = half_life(residency_.cache_bytes, bytes, by_use());
}

std::vector<bool> Engine::by_use() const {
  std::vector<bool> by_use;
  for (const Group& group : groups_) by_use.push_back(group.by_use);
  return by_use;
}

/// Forms groups and chooses residents, where those of `on_device` are groups and residents already. Returns
/// their sizes.
std::vector<std::size_t> Engine::form_groups_and_residents(
    const std::vector<std::vector<WeightId>>& on_device, std::size_t budget) {
  Units all = units();
  const Grouping grouping = preferred_grouping(all);
  std::vector<std::size_t> bytes = form_groups(std::move(all), grouping, on_device);
  if (options_.budget > 0 && least_budget(bytes) > options_.budget)
    bytes = form_groups(units(), {1, 0, 0}, {});  // as small as can be: what does not fit now never will
  check_kept(bytes, budget);
  std::vector<bool> keep, tiny, is_on_device;
  for (const Group& group : groups_) {
    keep.push_back(group.keep);
    tiny.push_back(group.tiny);
    is_on_device.push_back(group.on_device);
  }
  residency_ = plan_with_cache(bytes, keep, tiny, by_use(), budget, options_.prefetch);
  if (std::find(is_on_device.begin(), is_on_device.end(), true) == is_on_device.end()) return bytes;

  // As many of them stay as leave the usual room to run ahead. If the usual residents are more, others fill
  // up.
  const std::vector<bool> usual = residency_.residency.resident;
  std::vector<bool> stay;
  std::size_t usual_bytes = 0, on_device_bytes = 0, largest = 1;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    stay.push_back(keep[id] || (tiny[id] && usual[id]));
    usual_bytes += usual[id] ? bytes[id] : 0;
    on_device_bytes += stay[id] || is_on_device[id] ? bytes[id] : 0;
    largest = std::max(largest, is_on_device[id] ? bytes[id] : 0);
  }
  const auto try_with = [&](const std::vector<bool>& resident) {
    try {
      const PlanWithCache plan =
          with_cache(resident, bytes, by_use(), residency_.cache_bytes, budget, options_.prefetch);
      if (plan.residency.depth < residency_.residency.depth) return false;
      residency_ = plan;
      return true;
    } catch (const BudgetError&) {
      return false;
    }
  };
  for (std::size_t most = std::max(on_device_bytes, usual_bytes);;
       most -= std::min(most - usual_bytes, largest)) {
    if (try_with(residents_within(most, bytes, stay, is_on_device, by_use())) || most == usual_bytes)
      return bytes;
  }
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
