#include "transfer/stream_events.h"

#include <mutex>
#include <new>
#include <utility>

#include "core/check.h"

namespace dynswap {

StreamClock::StreamClock(StreamDevicePtr device, StreamHandle stream) : device_(std::move(device)) {
  const OnDevice scope(*device_);
  zero_ = device_->make_event(/*timed=*/true);
  zero_->record(stream);
  zero_->synchronise();
  host_ns_ = monotonic_ns();
}

std::optional<Interval> StreamClock::interval(const DeviceEvent& first,
                                              const DeviceEvent& last) const noexcept {
  const auto nanoseconds = [](double milliseconds) { return static_cast<std::int64_t>(1e6 * milliseconds); };
  try {
    const OnDevice scope(*device_);
    const std::int64_t end = host_ns_ + nanoseconds(last.milliseconds_since(*zero_));
    return Interval{end - nanoseconds(last.milliseconds_since(first)), end};
  } catch (const std::exception&) {
    return std::nullopt;  // the device is lost, or cannot time events
  }
}

DeviceEventPtr EventPool::take(bool timed) {
  {
    const std::lock_guard lock(mutex_);
    auto& free = free_[timed];
    if (!free.empty()) {
      DeviceEventPtr event = std::move(free.back());
      free.pop_back();
      return event;
    }
  }
  const OnDevice scope(*device_);
  return device_->make_event(timed);
}

void EventPool::give_back(DeviceEventPtr event, bool timed) noexcept {
  if (!devices_usable()) return;
  try {
    const std::lock_guard lock(mutex_);
    free_[timed].push_back(std::move(event));
  } catch (const std::bad_alloc&) {
    // it is destroyed
  }
}

void StreamEvent::record(StreamHandle stream) {
  event_->record(stream);
  state_.store(State::recorded, std::memory_order_release);
  state_.notify_all();
}

void StreamEvent::fail(std::exception_ptr error) noexcept {
  error_ = std::move(error);
  done_.store(true, std::memory_order_release);
  state_.store(State::failed, std::memory_order_release);
  state_.notify_all();
}

void StreamEvent::wait_for_record() const {
  if (!recorded() && forks() != made_after_)  // the thread that would record it is not in this process
    throw ClosedError(kOnlyInParent);
  state_.wait(State::pending, std::memory_order_acquire);
  if (state_.load(std::memory_order_acquire) == State::failed) std::rethrow_exception(error_);
}

void StreamEvent::block(StreamHandle stream) const {
  if (!known_done()) event_->block(stream);
}

void StreamEvent::synchronise() const {
  if (known_done()) return;
  const OnDevice scope(pool_->device());
  event_->synchronise();
  done_.store(true, std::memory_order_release);
}

std::optional<Interval> StreamEvent::when() const noexcept {
  if (!clock_ || !devices_usable() || !done() || error_) return std::nullopt;
  return clock_->interval(begin ? *begin->event_ : *event_, *event_);
}

bool StreamEvent::done() const noexcept {
  if (known_done()) return true;
  if (!devices_usable()) return true;
  if (!recorded()) return false;
  try {
    const OnDevice scope(pool_->device());
    if (!event_->passed()) return false;
  } catch (const std::exception&) {
    return false;  // it was not asked
  }
  done_.store(true, std::memory_order_release);
  return true;
}

}  // namespace dynswap
