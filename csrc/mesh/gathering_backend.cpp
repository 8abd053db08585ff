#include "mesh/gathering_backend.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "core/check.h"

namespace dynswap {

/// Invariant: the memory may be written to once it is true, also after a failure.
bool GatheredCopies::Gathered::done() const noexcept {
  switch (state.load(std::memory_order_acquire)) {
    case State::queued:
      return false;
    case State::issued:
      return !end || end->done();
    case State::failed:
      break;
  }
  if (started) return !share || share->done();
  return std::all_of(after.begin(), after.end(),
                     [](const EventPtr& event) { return !event || event->done(); });
}

std::optional<Interval> GatheredCopies::Gathered::when() const noexcept {
  if (state.load(std::memory_order_acquire) != State::issued) return std::nullopt;
  if (!end) return host_time;
  const std::optional<Interval> first = share ? share->when() : std::nullopt;
  const std::optional<Interval> last = end->when();
  return first && last ? std::optional(Interval{first->begin, last->end}) : std::nullopt;
}

bool GatheringBackend::release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept {
  std::vector<EventPtr> events;
  for (const EventPtr& event : after) {
    const auto* const gathered = dynamic_cast<const GatheredCopies::Gathered*>(event.get());
    if (gathered == nullptr) {
      events.push_back(event);
    } else if (gathered->state != GatheredCopies::Gathered::State::issued) {
      return false;
    } else if (gathered->end) {
      events.push_back(gathered->end);
    }
  }
  return inner_->release_after(memory, events);
}

EventPtr GatheringBackend::copy(CopyRequest request) {
  SharedGroupPtr group;
  if (const SharedPart part = request.whole ? copies_->shared_part_of(*request.whole) : SharedPart();
      part.identity != 0) {
    std::vector<SourcePtr> sources;
    for (const WholeGroup::Part& part : request.whole->parts) sources.push_back(part.source);
    Known before;  // goes without the lock
    const std::lock_guard lock(mutex_);
    Known& known = known_[request.whole->group];
    if (known.sources != sources || known.group->identity != part.identity)
      before = std::exchange(known, Known{std::move(sources), copies_->shared(*request.whole, part)});
    group = known.group;
  }
  if (const bool measuring = copies_->measuring_; group && measured_.exchange(measuring) != measuring)
    if (!times_wanted_) set_times();
  return copies_->copy(inner_, std::move(request), group);
}

void GatheringBackend::wait(Stream consumer, const EventPtr& copied) {
  auto* const gathered = dynamic_cast<GatheredCopies::Gathered*>(copied.get());
  if (gathered == nullptr) return inner_->wait(consumer, copied);
  try {
    copies_->wait(*gathered);
  } catch (const SourceError&) {
    if (!copies_->raised_.exchange(true)) throw;
    copies_->copy_whole_again(*gathered);  // once somebody knows
  }
  if (gathered->end) inner_->wait(consumer, gathered->end);
}

void GatheringBackend::keep_times(bool keep) {
  times_wanted_ = keep;
  set_times();
}

void GatheringBackend::set_times() {
  const std::lock_guard lock(times_mutex_);
  inner_->keep_times(times_wanted_ || measured_);
}

void GatheringBackend::close() noexcept {
  copies_->let_go_of(*inner_);
  inner_->close();
  std::unordered_map<std::uint32_t, Known> known;
  const std::lock_guard lock(mutex_);
  known.swap(known_);
}

void GatheringBackend::synchronise(const EventPtr& event) noexcept {
  auto* const gathered = dynamic_cast<GatheredCopies::Gathered*>(event.get());
  if (gathered == nullptr) return inner_->synchronise(event);
  try {
    copies_->wait(*gathered);
  } catch (const SourceError&) {  // it is over as well
  } catch (const std::exception&) {
    return;  // in a forked child it never is
  }
  if (gathered->end) return inner_->synchronise(gathered->end);
  while (!gathered->done()) std::this_thread::yield();
}

}  // namespace dynswap
