// Engine: residents that stay on the device when another plan takes their plan's place.
//
// Note [Residents go from plan to plan]
// A new adapter, or one that is deleted, makes a new plan, in which most weights are what they were. So
// arrange() keeps the groups of residents that are on the device and chooses them before others (a measured
// plan brings its own groups), and inherit() takes their memory with the bytes in it, before the earlier
// engine closes. It is as if the earlier engine had gone on with them:
// - A resident is inherited only after a reader has waited for its copy. The earlier engine's backend ends
//   all its copies as it closes, so the new engine has no event to wait for.
// - Nobody holds a lease on them. Who asks the earlier engine for one later finds it closed for them.
// - The events of those who read them come along, and the next copy to that place waits for these.
// - What a graph has captured is not taken over: its replays read it without a lease.
// The masters are those of the earlier plan, unchanged: Session::take_over() looks.
#include <algorithm>
#include <mutex>
#include <utility>

#include "core/engine.h"
#include "core/protection.h"

namespace dynswap {

std::vector<std::vector<WeightId>> Engine::residents_on_device() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::vector<WeightId>> on_device;
  if (closed_ || !planned_) return on_device;
  for (const Group& group : groups_) {
    if (group.home && group.home_occupant && group.copy == group.home_occupant)
      on_device.push_back(group.weights);
  }
  return on_device;
}

void Engine::inherit(Engine& earlier, const std::vector<std::optional<WeightId>>& ids) {
  DYNSWAP_CHECK(!layout_ && !planned_, "inherit() comes between arrange() and plan()");
  const std::scoped_lock lock(mutex_, earlier.mutex_);
  if (closed_ || abandoned_ || earlier.abandoned_ || earlier.closed_ || !earlier.planned_) return;
  for (GroupId id = 0; id < groups_.size(); ++id) {
    Group& group = groups_[id];
    const std::optional<WeightId> first = ids[group.weights.front()];
    if (!residency_.resident[id] || !first) continue;
    const GroupId other_id = earlier.weights_[*first].group;
    Group& other = earlier.groups_[other_id];
    if (!can_inherit(group, ids, earlier, other_id)) continue;

    const std::shared_ptr<DeviceCopy> old = other.home_occupant;
    auto copy = std::make_shared<DeviceCopy>();
    copy->group = id;
    copy->place = Place::resident;
    copy->state = DeviceCopy::State::issued;
    copy->memory = other.home;
    copy->base = old->base;
    copy->bytes = group.bytes;
    copy->parts.resize(group.weights.size());
    if (PROTECTED(readers_inherited)) copy->released = old->released;
    group.home = std::move(other.home);
    group.home_occupant = copy;
    group.copy = std::move(copy);
    group.held_back.reset();

    earlier.stats_.resident_bytes -= other.bytes;
    --earlier.stats_.resident_groups;
    other.inherited_by_next = true;
    other.home.reset();
    other.home_occupant.reset();
    earlier.detach(old);
  }
}

/// Whether a resident of the earlier engine has the bytes of this group, as they lie in it, and may go.
bool Engine::can_inherit(const Group& group, const std::vector<std::optional<WeightId>>& ids,
                         const Engine& earlier, GroupId other_id) const {
  const Group& other = earlier.groups_[other_id];
  const DeviceCopy* const copy = other.home_occupant.get();
  if (!other.home || copy == nullptr || other.copy.get() != copy || other.captured) return false;
  if (copy->state != DeviceCopy::State::issued || copy->any_outdated()) return false;
  if (copy->waited.empty() && PROTECTED(arrived_before_inherited)) return false;
  if (copy->leases > 0 && PROTECTED(lease_not_inherited)) return false;
  if (other.bytes != group.bytes || other.weights.size() != group.weights.size()) return false;
  for (std::size_t part = 0; part < group.weights.size(); ++part) {
    const std::optional<WeightId> id = ids[group.weights[part]];
    if (!id || *id != other.weights[part]) return false;
    const Weight &now = weights_[group.weights[part]], &before = earlier.weights_[*id];
    if (now.offset != before.offset || !now.source->same_shape(*before.source)) return false;
    if (!now.source->has_bytes || !before.source->has_bytes) return false;
  }
  return true;
}

/// Frees what inherit() took, if plan() fails.
void Engine::give_back_inherited() noexcept {
  {
    const std::lock_guard lock(mutex_);
    for (Group& group : groups_) {
      if (!group.home_occupant) continue;
      retired_.push_back({std::move(group.home), overwrite_after(*group.home_occupant), 0, true});
      group.home.reset();
      group.home_occupant->memory.reset();
      group.home_occupant.reset();
      group.copy.reset();
    }
  }
  free_retired();
}

}  // namespace dynswap
