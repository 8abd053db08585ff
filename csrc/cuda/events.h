// Events, pooled: a pass records thousands and creates none. They take no time unless they are asked to.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/backend.h"
#include "cuda/context.h"
#include "platform/fork_safe.h"

namespace dynswap {

class Reads;  // transfer/staging.h

/// One moment on the device and on the host: what times of events are told by. Thread-safe.
class DeviceClock {
 public:
  /// Makes the calling thread wait for `stream`.
  DeviceClock(std::shared_ptr<const DeviceContext> context, cudaStream_t stream);
  ~DeviceClock();
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  /// From one event to another, in nanoseconds of the host's monotonic clock. They have timing and are done.
  /// The length is told by the two alone: CUDA tells times in single-precision milliseconds, whose steps are
  /// a quarter of one an hour after the clock's own event.
  std::optional<Interval> interval(cudaEvent_t first, cudaEvent_t last) const noexcept;

 private:
  std::optional<std::int64_t> between(cudaEvent_t first, cudaEvent_t last) const noexcept;

  const std::shared_ptr<const DeviceContext> context_;
  cudaEvent_t zero_ = nullptr;
  std::int64_t host_ns_ = 0;
};

/// Thread-safe. Outlives the backend while an event is held.
class EventPool {
 public:
  explicit EventPool(std::shared_ptr<const DeviceContext> context) : context_(std::move(context)) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  cudaEvent_t take(bool timed);
  void give_back(cudaEvent_t event, bool timed) noexcept;
  const DeviceContext& context() const noexcept { return *context_; }

 private:
  const std::shared_ptr<const DeviceContext> context_;
  Mutex mutex_;
  std::array<std::vector<cudaEvent_t>, 2> free_;  ///< LOCK: mutex_; without timing, and with it
};

/// A point of one stream. Recorded once, by whoever makes it, before anybody else sees it. The handle
/// goes back to the pool with it: a wait that was enqueued keeps the point that it saw, so recording the
/// handle again later moves nothing.
class CudaEvent final : public Event {
 public:
  /// With a clock it knows when it happened.
  explicit CudaEvent(std::shared_ptr<EventPool> pool, std::shared_ptr<const DeviceClock> clock = nullptr)
      : pool_(std::move(pool)), clock_(std::move(clock)), event_(pool_->take(clock_ != nullptr)) {}
  ~CudaEvent() override { pool_->give_back(event_, clock_ != nullptr); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cudaStream_t stream);
  bool done() const noexcept override;
  std::optional<Interval> when() const noexcept override;
  /// Whether done() has returned true before; makes no call.
  bool known_done() const noexcept { return done_.load(std::memory_order_acquire); }
  cudaEvent_t handle() const noexcept { return event_; }

  /// Set for the end of a copy with staged pieces: its reads (Note [A staged copy]).
  std::shared_ptr<Reads> reads;
  /// Set for the end of a copy that is timed.
  std::shared_ptr<const CudaEvent> begin;

 private:
  const std::shared_ptr<EventPool> pool_;
  const std::shared_ptr<const DeviceClock> clock_;
  const cudaEvent_t event_;
  mutable std::atomic<bool> done_{false};
};

}  // namespace dynswap
