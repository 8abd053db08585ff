// Events of a stream, pooled: a pass records thousands and creates none. They are not timed unless that is
// asked for.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "core/backend.h"
#include "platform/fork_safe.h"
#include "transfer/stream_device.h"

namespace dynswap {

class Reads;  // transfer/staging.h

using StreamDevicePtr = std::shared_ptr<const StreamDevice>;

/// One moment on the device and on the host: what times of events are told by. Thread-safe.
class StreamClock {
 public:
  /// Makes the calling thread wait for `stream`. Throws DeviceError.
  StreamClock(StreamDevicePtr device, StreamHandle stream);

  /// From one event to another, in nanoseconds of the host's monotonic clock. They have timing and are done.
  /// The length is told by the two alone: CUDA tells times in single-precision milliseconds, whose steps are
  /// a quarter of one an hour after the clock's own event.
  std::optional<Interval> interval(const DeviceEvent& first, const DeviceEvent& last) const noexcept;

 private:
  const StreamDevicePtr device_;
  DeviceEventPtr zero_;
  std::int64_t host_ns_ = 0;
};

/// Thread-safe. Outlives the backend while an event is held.
class EventPool {
 public:
  explicit EventPool(StreamDevicePtr device) : device_(std::move(device)) {}

  DeviceEventPtr take(bool timed);
  void give_back(DeviceEventPtr event, bool timed) noexcept;
  const StreamDevice& device() const noexcept { return *device_; }

 private:
  const StreamDevicePtr device_;
  Mutex mutex_;
  std::array<std::vector<DeviceEventPtr>, 2> free_;  ///< LOCK: mutex_; without timing, and with it
};

/// A point of one stream. Recorded once. It may be handed out before it is recorded: who uses the event of a
/// copy that another thread issues (Note [A copy that is issued later]) waits until that thread has recorded
/// it. When this object dies, the device's event goes back to the pool.
class StreamEvent final : public Event {
 public:
  /// With a clock, when() can tell the time of the point.
  explicit StreamEvent(std::shared_ptr<EventPool> pool, std::shared_ptr<const StreamClock> clock = nullptr)
      : pool_(std::move(pool)), clock_(std::move(clock)), event_(pool_->take(clock_ != nullptr)) {}
  ~StreamEvent() override { pool_->give_back(std::move(event_), clock_ != nullptr); }
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  /// Within an OnDevice, as block(). Throws DeviceError.
  void record(StreamHandle stream);
  /// Called in place of record(), once nothing of the copy is under way any more: every waiter gets `error`.
  void fail(std::exception_ptr error) noexcept;

  /// Blocks the calling thread until record() or fail(), not until the point is reached. Throws fail()'s
  /// error. In a forked child, whose parent was to record it, throws ClosedError.
  void wait_for_record() const;
  bool recorded() const noexcept { return state_.load(std::memory_order_acquire) != State::pending; }

  /// Makes `stream` wait for the point, which has been recorded. Throws DeviceError.
  void block(StreamHandle stream) const;
  /// Blocks the calling thread until the point, which has been recorded, is reached. Throws DeviceError.
  void synchronise() const;

  bool done() const noexcept override;
  std::optional<Interval> when() const noexcept override;
  /// Whether done() has returned true before; makes no call.
  bool known_done() const noexcept { return done_.load(std::memory_order_acquire); }

  /// The clock that times it; null if it is not timed.
  const std::shared_ptr<const StreamClock>& clock() const noexcept { return clock_; }

  /// Set for the end of a copy with staged pieces: its reads (Note [A staged copy]).
  std::shared_ptr<Reads> reads;
  /// Set for the end of a copy that is timed.
  std::shared_ptr<const StreamEvent> begin;

 private:
  enum class State { pending, recorded, failed };

  const std::shared_ptr<EventPool> pool_;
  const std::shared_ptr<const StreamClock> clock_;
  DeviceEventPtr event_;
  std::exception_ptr error_;  ///< set before `failed`, and not afterwards
  std::atomic<State> state_{State::pending};
  const unsigned made_after_ = forks();
  mutable std::atomic<bool> done_{false};
};

using StreamEventPtr = std::shared_ptr<StreamEvent>;

/// An event of a StreamBackend's, as what it is.
inline const StreamEvent& on_stream(const EventPtr& event) { return static_cast<const StreamEvent&>(*event); }

}  // namespace dynswap
