// Engine: how it comes to its plan, and takes the memory for it.
#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

#include "core/engine.h"

namespace dynswap {

WeightId Engine::add_weight(SourcePtr source, std::uint64_t unit, WeightOptions options) {
  return layout().add_weight(std::move(source), unit, options);
}

void Engine::share_weight(WeightId weight, std::uint64_t unit, WeightOptions options) {
  layout().share_weight(weight, unit, options);
}

bool Engine::holds_all() { return layout().holds_all(); }

Layout& Engine::layout() const {
  DYNSWAP_CHECK(layout_, "weights are added before arrange(), which is called once");
  return *layout_;
}

void Engine::arrange(const std::vector<std::vector<WeightId>>& on_device) {
  layout().arrange(on_device);
  const std::unique_ptr<Layout> found = std::move(layout_);
  if (found->weights().empty()) return;
  stats_.groups = found->groups().size();
  stats_.weight_bytes = found->group_bytes();
  residency_ = std::move(found->residency());
  Groups groups = found->group_traits();
  half_life_ = half_life(residency_.cache_bytes, groups);
  // When all residents have given way, no more is left than with budget="minimum".
  if (options_.residents_give_way) {
    for (GroupTraits& group : groups) group.keep = group.tiny = false;
    const std::size_t least = plan_residency(groups, 0, options_.prefetch).arena_bytes;
    residency_.arena_bytes = std::min(residency_.arena_bytes, least);
  }
  weights_ = std::move(found->weights());
  groups_ = {std::make_move_iterator(found->groups().begin()),
             std::make_move_iterator(found->groups().end())};
}

void Engine::plan() {
  DYNSWAP_CHECK(!planned_, "plan() is called once");
  if (layout_) arrange();
  reserve_short_lived();
  if (weights_.empty()) {
    planned_ = true;
    return;
  }
  const ResidencyPlan residency = std::exchange(residency_, {});
  std::vector<bool> inherited;
  {
    const std::lock_guard lock(mutex_);
    for (const Group& group : groups_) inherited.push_back(group.home != nullptr);
  }
  Memory arena, cache;  // all or nothing
  std::vector<Memory> homes(groups_.size());
  try {
    if (residency.arena_bytes > 0) arena = backend_->allocate(residency.arena_bytes);
    if (residency.cache_bytes > 0) cache = backend_->allocate(residency.cache_bytes);
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
  std::vector<Schedule::Group> order;
  if (options_.prior) {
    std::copy_if(options_.prior->order.begin(), options_.prior->order.end(), std::back_inserter(order),
                 [&](GroupId id) { return std::binary_search(streamed.begin(), streamed.end(), id); });
  }
  schedule_.prime(streamed);
  schedule_.learn(order);
  use_order_ = UseOrder(groups_.size());
  arena_ = Arena(residency.arena_bytes);
  cache_ = Arena(residency.cache_bytes);
  stats_.resident_bytes = residency.resident_bytes;
  stats_.arena_bytes = residency.arena_bytes + residency.cache_bytes;
  planned_bytes_ = std::max<std::size_t>(options_.budget, residency.resident_bytes + stats_.arena_bytes);
  stats_.depth = residency.depth;
  note_peak();
  planned_ = true;
}

}  // namespace dynswap
