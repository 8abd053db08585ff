// Engine: groups whose bytes come and go, as those of tensors that autograd saves.
//
// Note [Short-lived groups]
// A tensor that a forward saved for backward, and that has left the device since, is fetched as a weight is:
// it has a group of its own, which takes part in the order that the schedule learns, and is copied ahead with
// the weights that are needed before and after it. So both share the bus in the order of their need. Unlike a
// weight
// - it has bytes for a while only, from offer() to give_back_short_lived(). Who takes one is given the lowest
//   that is free. So in each step the same number stands for what was saved at the same place, whatever its
//   size, and the order of one step foretells the next.
// - its copies lie in memory of their own, as in plain torch, and go with their last lease. Copies ahead of
//   need are made as far as EngineOptions::short_lived_bytes holds them beside what never left the device.
// Weights and groups are appended while other threads use earlier ones, so there is room for all of them from
// the beginning.
#include <algorithm>
#include <mutex>
#include <utility>

#include "core/engine.h"
#include "core/protection.h"

namespace dynswap {

namespace {

/// A step that saves more tensors keeps the rest on the device.
constexpr std::size_t kMostShortLived = 1u << 14;

SourcePtr without_bytes_yet() {
  static const SourcePtr none = [] {
    Source made;
    made.name = "a tensor saved for backward";
    made.has_bytes = false;
    return std::make_shared<const Source>(std::move(made));
  }();
  return none;
}

}  // namespace

void Engine::reserve_short_lived() {
  if (options_.short_lived_bytes == 0) return;
  weights_.reserve(weights_.size() + kMostShortLived);
  groups_.reserve(groups_.size() + kMostShortLived);
}

std::optional<WeightId> Engine::take_short_lived() {
  const std::lock_guard lock(mutex_);
  if (closed_ || !planned_ || abandoned_) return std::nullopt;
  if (!free_short_lived_.empty()) return free_short_lived_.extract(free_short_lived_.begin()).value();
  if (weights_.size() == weights_.capacity() || groups_.size() == groups_.capacity()) return std::nullopt;
  const auto id = static_cast<WeightId>(weights_.size());
  const auto group_id = static_cast<GroupId>(groups_.size());
  Layout::Group planned;
  planned.weights.push_back(id);
  Group& group = groups_.emplace_back(std::move(planned));
  group.short_lived = true;
  Weight& weight = weights_.emplace_back();
  weight.source = without_bytes_yet();
  weight.group = group_id;
  return id;
}

void Engine::offer(WeightId id, SourcePtr source, EventPtr written) {
  const std::lock_guard lock(mutex_);
  Group& group = groups_[weights_[id].group];
  DYNSWAP_CHECK(group.short_lived && !group.copy, "only a short-lived weight without bytes is offered some");
  group.bytes = source->wanted_bytes();
  group.written = std::move(written);
  weights_[id].source.swap(source);
}

void Engine::pass_by(WeightId id, Use use) {
  std::vector<Planned> planned;
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || !planned_ || abandoned_) return;
    ++tick_;
    const GroupId group = weights_[id].group;
    Consumer& at = consumer_of(use.thread);
    if (schedule_.observe(at.cursor, group) && options_.prefetch > 0) look_ahead(at.cursor, group, planned);
  }
  if (!planned.empty()) issue(planned);
}

void Engine::give_back_short_lived(WeightId id) noexcept {
  if (abandoned_) return;
  SourcePtr source = without_bytes_yet();
  EventPtr written;
  {
    const std::lock_guard lock(mutex_);
    Group& group = groups_[weights_[id].group];
    if (group.copy) {
      if (!group.copy->read) ++stats_.wasted_prefetches;
      detach(std::shared_ptr<DeviceCopy>(group.copy));
    }
    weights_[id].source.swap(source);
    written.swap(group.written);
    free_short_lived_.insert(id);
  }
  free_retired();
}

void Engine::note_copy_out(WeightId id, EventPtr from, EventPtr to, std::size_t bytes) {
  GroupId group = 0;
  {
    const std::lock_guard lock(mutex_);
    group = weights_[id].group;
  }
  recorder_.copied_out(group, std::move(from), std::move(to), bytes);
}

void Engine::note_kept(std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  kept_ = bytes;
}

bool Engine::has_room_beside(std::size_t bytes) const noexcept {
  if (short_lived_now_ == 0) return true;
  return kept_ + short_lived_now_ + bytes <= options_.short_lived_bytes;
}

/// After what wrote its bytes on the host.
void Engine::place_beside(Planned& planned) {
  const Group& group = groups_[planned.copy->group];
  planned.copy->place = Place::beside;
  short_lived_now_ += planned.copy->bytes;
  std::vector<EventPtr> after;
  if (group.written && PROTECTED(saved_back_after_left)) after.push_back(group.written);
  planned.displaced.push_back({0, planned.copy->bytes, nullptr, std::move(after)});
}

}  // namespace dynswap
