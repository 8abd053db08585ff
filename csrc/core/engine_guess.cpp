// Engine: copies of experts whose router has not chosen yet. Note [Experts of the next layer].
#include <mutex>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/engine.h"

namespace dynswap {

std::uint32_t Engine::guess(const std::vector<WeightId>& weights) {
  if (abandoned_ || options_.prefetch == 0) return 0;
  std::vector<Planned> planned;
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || !planned_) return 0;
    if (const std::uint32_t pause = judge_guesses(); pause > 0) return pause;
    ++tick_;
    const Arena::Rank rank = [this](const DeviceCopy& copy) {
      // What expect() was told stays, and so do the better guesses.
      return copy.read && groups_[copy.group].expected_at < told_at_ ? may_go(copy) : std::nullopt;
    };
    for (const WeightId id : weights) groups_[weights_[id].group].expected_at = tick_;
    for (const WeightId id : weights) {
      const GroupId group = weights_[id].group;
      DYNSWAP_CHECK(groups_[group].by_use, "groups in an order are fetched ahead by the schedule");
      if (groups_[group].copy) continue;
      if (guesses_.size() >= guess_limit_.most() || !prefetch(group, rank, planned)) break;
      guesses_.push_back({group, groups_[group].copy.get()});
    }
    stats_.guesses += guesses_.size();
    guesses_timed_ = guesses_.empty();
  }
  if (!planned.empty()) issue(planned);
  return 0;
}

bool Engine::has_room(WeightId id) const {
  const std::lock_guard lock(mutex_);
  if (closed_ || !planned_) return false;
  const Group& group = groups_[weights_[id].group];
  if (group.copy) return true;
  if (group.home) return !group.home_occupant || may_go(*group.home_occupant);
  return arena_of(group).has_room(group.bytes, [this](const DeviceCopy& copy) { return may_go(copy); });
}

/// Notes which guesses are still on their way, now that other groups are needed than before. Asks for events
/// without the lock.
void Engine::time_guesses(GroupId needed) {
  std::vector<EventPtr> copied;
  {
    const std::lock_guard lock(mutex_);
    // Each parameter of a layer's experts is expected on its own.
    if (std::exchange(told_, needed) == needed || std::exchange(guesses_timed_, true)) return;
    for (const Guess& guess : guesses_) {
      const DeviceCopy* const copy = groups_[guess.group].copy.get();
      copied.push_back(copy != nullptr && copy == guess.copy ? copy->copied : nullptr);
    }
  }
  std::vector<bool> on_its_way;
  for (const EventPtr& event : copied) on_its_way.push_back(event && !event->done());
  const std::lock_guard lock(mutex_);
  if (guesses_.size() != on_its_way.size()) return;  // another thread has guessed
  for (std::size_t i = 0; i < guesses_.size(); ++i) guesses_[i].in_the_way = on_its_way[i];
}

/// Learns what came of the latest guesses, and forgets them. Returns how many to leave out.
std::uint32_t Engine::judge_guesses() {
  std::size_t right = 0, wrong = 0, in_the_way = 0;
  for (const Guess& guess : std::exchange(guesses_, {})) {
    const Group& group = groups_[guess.group];
    const bool there = group.copy && group.copy.get() == guess.copy;
    if (there && (group.copy->read || group.expected_at >= told_at_)) {
      ++right;
      continue;
    }
    ++wrong;
    in_the_way += guess.in_the_way ? 1 : 0;
    if (!there) continue;
    group.copy->read = true;  // it gives way as its use has it
    ++stats_.wasted_prefetches;
  }
  stats_.right_guesses += right;
  return guess_limit_.learn(right, wrong, in_the_way);
}

}  // namespace dynswap
