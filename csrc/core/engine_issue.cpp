// Engine: what is asked of the backend. None of it runs under the engine's mutex.
#include "core/engine.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <optional>
#include <utility>

#include "core/protection.h"
#include "platform/fork_safe.h"

namespace dynswap {

namespace {

/// Stands for no stream: the events under it are not replaced when one is recorded on a real stream.
constexpr Stream kNoStream = ~Stream{0};

}  // namespace

CopyRequest Engine::request(const Planned& planned) const {
  const Group& group = groups_[planned.copy->group];
  CopyRequest request;
  request.demanded = planned.demanded;
  // Note [A large group arrives in parts]: what it displaces becomes free at different times, so each
  // part waits only for what it overwrites itself.
  std::vector<std::pair<std::size_t, std::size_t>> ranges;  // of the copy, one a step
  for (const Arena::Region& region : planned.displaced) {
    const bool free_now = region.after.empty();
    if (free_now && !ranges.empty() && request.steps.back().after.empty() &&
        ranges.back().second == region.offset) {
      ranges.back().second = region.offset + region.bytes;
      continue;
    }
    const bool wait = request.steps.empty() || PROTECTED(step_waits);
    request.steps.push_back({wait ? region.after : std::vector<EventPtr>(), {}});
    ranges.emplace_back(region.offset, region.offset + region.bytes);
  }
  if (request.steps.empty()) {
    request.steps.emplace_back();
    ranges.emplace_back(0, planned.copy->bytes);
  }
  for (std::size_t i = 0; i < group.weights.size(); ++i) {
    const SourcePtr& source = planned.sources[i];
    if (!source || !source->has_bytes) continue;  // nobody asks for it while its master has none
    const std::size_t element = scalar_size(source->wanted);
    const std::size_t begin = weights_[group.weights[i]].offset;
    const std::size_t end = begin + source->wanted_bytes();
    for (std::size_t step = 0; step < ranges.size(); ++step) {
      const std::size_t from = std::max(begin, ranges[step].first);
      const std::size_t to = std::min(end, ranges[step].second);
      if (from >= to) continue;
      std::vector<Piece>& pieces = request.steps[step].pieces;
      for_each_part(source, (from - begin) / element, (to - from) / element,
                    [&](const SourcePtr& part, std::uint64_t first, std::uint64_t count, std::uint64_t done) {
                      pieces.push_back({part, first, count, planned.copy->base + from + done * element});
                    });
    }
  }
  if (backend_->asks_for_whole_groups() && planned.copy->place == Place::arena) {
    WholeGroup whole{planned.copy->group, planned.copy->base, planned.copy->bytes, {}};
    for (std::size_t i = 0; i < group.weights.size(); ++i) {
      const SourcePtr& source = planned.sources[i];
      if (!source || !source->has_bytes) return request;
      whole.parts.push_back({source, weights_[group.weights[i]].offset});
    }
    request.whole = std::move(whole);
  }
  return request;
}

void Engine::issue(std::vector<Planned>& planned) {
  free_retired();
  bool closed = false;
  for (Planned& item : planned) {
    DeviceCopy& copy = *item.copy;
    std::uint64_t bytes = 0, decoded = 0;
    for (const SourcePtr& source : item.sources) {
      if (!source || !source->has_bytes) continue;
      bytes += source->stored_bytes();
      decoded += source->count * scalar_size(source->stored);
    }
    EventPtr copied;
    std::exception_ptr error;
    try {
      if (copy.in_block_of_its_own() && !copy.memory) {
        copy.memory = backend_->allocate(copy.bytes);
        copy.base = copy.memory.get();
      }
      copied = backend_->copy(request(item));
      if (const auto read = copied ? copied->bytes_read() : std::nullopt; read && bytes > 0) {
        const double ratio = static_cast<double>(decoded) / static_cast<double>(bytes);
        decoded = static_cast<std::uint64_t>(static_cast<double>(*read) * ratio);
        bytes = *read;
      }
      recorder_.copied(copy.group, copied, item.demanded, bytes);
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      closed = closed_;
      if (copied) copy.behind = std::exchange(latest_copy_, copied);
      copy.copied = std::move(copied);
      copy.waited.clear();  // a weight may have come once more
      copy.error = error;
      copy.state = error ? DeviceCopy::State::failed : DeviceCopy::State::issued;
      ++stats_.copies;
      if (groups_[copy.group].short_lived) {
        stats_.restored_bytes += bytes;
      } else {
        stats_.bytes_moved += bytes;
        stats_.bytes_decoded += decoded;
      }
      ++groups_[copy.group].figures.copies;
      groups_[copy.group].figures.bytes_moved += bytes;
      if (error) {
        // Nothing was enqueued, so what was to be waited for is still to be waited for.
        for (const Arena::Region& region : item.displaced) {
          for (const EventPtr& event : region.after) copy.released.emplace_back(kNoStream, event);
        }
      }
      if (error && PROTECTED(failed_copy_refused)) detach(item.copy);
      // It was given up while it was being issued.
      else if (!copy.attached && copy.evictable())
        dispose(item.copy);
    }
    issued_.notify_all();
  }
  // What was given up meanwhile by close(), nobody else frees.
  if (closed) free_retired();
}

void Engine::order_after_copy(const std::shared_ptr<DeviceCopy>& copy, Stream consumer, bool prefetched) {
  EventPtr copied, latest;
  Lateness late;
  {
    std::unique_lock lock(mutex_);
    if (!issued_.wait(lock, [&] { return copy->state != DeviceCopy::State::issuing; })) refuse_in_child();
    if (copy->state == DeviceCopy::State::failed) std::rethrow_exception(copy->error);
    if (copy->has_waited(consumer)) return;
    latest = copy->copied;
    const bool first = copy->waited.empty();
    if (first ? PROTECTED(read_after_copy) : PROTECTED(every_stream_waits)) copied = copy->copied;
    late = {prefetched, copy->held_back, copied, copy->behind};
  }
  const bool waits = copied && !copied->done();
  const EventPtr from = waits && recorder_.on() ? backend_->mark(consumer) : nullptr;
  const std::int64_t begin = backend_->now();
  try {
    if (copied) backend_->wait(consumer, copied);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (PROTECTED(failed_copy_refused)) {
      copy->state = DeviceCopy::State::failed;
      copy->error = std::current_exception();
      if (copy->attached) detach(copy);
    }
    throw;
  }
  const std::int64_t stalled = waits ? backend_->now() - begin : 0;
  const Cause cause = waits ? why(late, stalled) : Cause::bus_bound;
  if (from) recorder_.waited(copy->group, from, backend_->mark(consumer), late);
  const std::optional<Interval> when = copied ? copied->when() : std::nullopt;
  const std::lock_guard lock(mutex_);
  GroupFigures& figures = groups_[copy->group].figures;
  if (waits) {
    const auto stall = static_cast<std::uint64_t>(stalled);
    stats_.stall_ns += stall;
    figures.stall_ns[static_cast<std::size_t>(cause)] += stall;
  }
  if (waits && prefetched) {
    ++stats_.late_hits;
    ++figures.late_hits;
  }
  if (when && copy->waited.empty())
    figures.copy_ns = figures.copy_ns.value_or(0) + static_cast<std::uint64_t>(when->end - when->begin);
  // Meanwhile a weight may have come once more (Note [One outdated weight of a group]).
  if (copy->copied == latest && !copy->has_waited(consumer)) copy->waited.push_back(consumer);
}

void Engine::use_on(const std::shared_ptr<DeviceCopy>& copy, Stream consumer) {
  if (abandoned_) return;
  {
    const std::lock_guard lock(mutex_);
    copy->add_reader(consumer);
  }
  order_after_copy(copy, consumer, /*prefetched=*/false);
}

/// Note [One outdated weight of a group]
/// A group is one copy. If a master changes while another weight of its group is in use, as a bias is found
/// written when its layer's weight has been handed out, the group cannot be fetched again: there may be no
/// room for two of it. So the weight alone is copied once more, to the same place: nobody has a lease on its
/// part, and the copy waits for events that are recorded now on all streams that have read any of the group.
/// Later readers of the group wait for it. If somebody still has the outdated weight, its bytes stay as they
/// are, and the group is fetched to another place. The copy goes as a whole with its last lease if something
/// in it is outdated by then: many weights travel together then, and ahead.
///
/// Returns nothing if the weight is up to date, or if its group has to be fetched elsewhere: then the group
/// has no copy any more. May give up the lock for a while.
std::optional<Engine::Planned> Engine::renew_outdated(WeightId id, std::unique_lock<Mutex>& lock) {
  const Weight& weight = weights_[id];
  Group& group = groups_[weight.group];
  const auto outdated = [&] { return !closed_ && group.copy && group.copy->parts[weight.part].outdated; };
  while (outdated()) {
    const std::shared_ptr<DeviceCopy> copy = group.copy;
    if (copy->state == DeviceCopy::State::issuing) {
      if (!issued_.wait(lock, [&] { return copy->state != DeviceCopy::State::issuing; })) refuse_in_child();
      continue;
    }
    const std::vector<Stream> streams = copy->readers;
    std::vector<EventPtr> after;
    bool known = true;  // when all have read
    lock.unlock();
    for (const Stream stream : streams) {
      known = known && !backend_->capturing(stream);
      EventPtr read = known ? backend_->record(stream) : nullptr;
      if (read) after.push_back(std::move(read));
    }
    lock.lock();
    if (!outdated() || group.copy != copy || copy->state == DeviceCopy::State::issuing) continue;
    if (!known || copy->parts[weight.part].leases > 0) {
      detach(copy);
    } else if (copy->readers == streams) {
      if (!PROTECTED(write_after_read)) after.clear();
      return plan_renewal(id, std::move(after));
    }
  }
  return std::nullopt;
}

void Engine::drop_lease(const std::shared_ptr<DeviceCopy>& copy, std::size_t part,
                        std::shared_ptr<void>& left) {
  DeviceCopy::Part& own = copy->parts[part];
  --copy->leases;
  --own.leases;
  --stats_.live_leases;
  if (own.leases == 0 && copy->attached && !own.outdated) own.left = std::move(left);
  if (!copy->evictable()) return;
  if (copy->attached && (copy->in_block_of_its_own() || copy->any_outdated())) {
    // Memory of its own goes with its last lease (Invariant 4).
    detach(copy);
  } else if (!copy->attached) {
    dispose(copy);
  }
}

void Engine::release(const std::shared_ptr<DeviceCopy>& copy, std::size_t part,
                     std::shared_ptr<void> left) noexcept {
  if (abandoned_) {
    new auto(copy);  // leaked: see ~Engine()
    return;
  }
  // Note [The last lease records before it lets go]: were the count to fall first, another thread could
  // choose the slot while the events that guard it are still being recorded. A lease taken meanwhile
  // leaves its streams in `readers`, so the loop looks again.
  bool to_free = false;
  for (bool held = true; held;) {
    std::vector<Stream> streams;
    {
      const std::lock_guard lock(mutex_);
      if (copy->leases > 1 || copy->readers.empty()) {
        drop_lease(copy, part, left);
        held = false;
        to_free = !retired_.empty();
      } else {
        streams = std::exchange(copy->readers, {});
        if (!PROTECTED(release_before_reuse)) {
          drop_lease(copy, part, left);
          held = false;
        }
      }
    }
    if (!record_readers(copy, part, streams)) held = false;
  }
  if (to_free) free_retired();
}

/// Note [A lease that dies inside a capture]: a reader whose stream is captured has no point in time that a
/// copy could be made to wait for. What it was given before the capture may still be queued, though. So the
/// lease is kept for it, with nobody holding it any more, until its stream can be recorded on again. Returns
/// false if that is so.
bool Engine::record_readers(const std::shared_ptr<DeviceCopy>& copy, std::size_t part,
                            const std::vector<Stream>& streams) noexcept {
  bool all = true;
  for (const Stream stream : streams) {
    if (backend_->capturing(stream)) {
      const std::lock_guard lock(mutex_);
      copy->add_reader(stream);
      if (std::exchange(all, false)) {
        --stats_.live_leases;
        postponed_.emplace_back(copy, part);
        any_postponed_ = true;
      }
      continue;
    }
    EventPtr event;
    try {
      event = backend_->record(stream);
    } catch (const std::exception&) {
      continue;  // the device is lost: nothing will be written there either
    }
    const std::lock_guard lock(mutex_);
    copy->add_released(stream, std::move(event));
    if (!PROTECTED(record_every_stream)) return all;
  }
  return all;
}

void Engine::release_postponed() noexcept {
  std::vector<std::pair<std::shared_ptr<DeviceCopy>, std::size_t>> copies;
  {
    const std::lock_guard lock(mutex_);
    copies.swap(postponed_);
    any_postponed_ = false;
    stats_.live_leases += copies.size();
  }
  for (const auto& [copy, part] : copies) release(copy, part);
}

/// Note [A plan goes before the next one comes]: there is no room for two of them, so a closed engine's
/// memory is given back at once, though its last readers may be queued: what they read is not handed out
/// again before they are done, in the order of the allocator's stream. So is memory outside the budget that
/// was read on that stream alone: otherwise a host that is far ahead of the device would hold more and more
/// of it. While the engine is open, what was read on another stream is kept until its readers are done, as it
/// is given back all the time and must not hold up a stream. So is what cannot be ordered.
void Engine::free_retired() noexcept {
  std::vector<Retired> retired;
  {
    const std::lock_guard lock(mutex_);
    if (retired_.empty()) return;
    retired.swap(retired_);
  }
  const auto still_used = std::stable_partition(retired.begin(), retired.end(), [this](const Retired& item) {
    const auto done = [](const EventPtr& event) { return !event || event->done(); };
    if (std::all_of(item.after.begin(), item.after.end(), done)) return true;
    return item.at_once && backend_->release_after(item.memory, item.after);
  });
  std::size_t freed_bytes = 0, freed_beside = 0;
  for (auto item = retired.begin(); item != still_used; ++item) {
    freed_bytes += item->overflow_bytes;
    freed_beside += item->short_lived_bytes;
  }
  std::vector<Retired> kept(std::make_move_iterator(still_used), std::make_move_iterator(retired.end()));
  retired.clear();  // frees, without the lock
  const std::lock_guard lock(mutex_);
  overflow_now_ -= freed_bytes;
  short_lived_now_ -= freed_beside;
  retired_.insert(retired_.end(), std::make_move_iterator(kept.begin()), std::make_move_iterator(kept.end()));
}

}  // namespace dynswap
