// Events without timing, pooled: a pass records thousands and creates none.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "core/backend.h"
#include "cuda/context.h"

namespace dynswap {

class Reads;  // cuda/staging.h

/// Thread-safe. Outlives the backend while an event is held.
class EventPool {
 public:
  explicit EventPool(std::shared_ptr<const DeviceContext> context) : context_(std::move(context)) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  cudaEvent_t take();
  void give_back(cudaEvent_t event) noexcept;
  const DeviceContext& context() const noexcept { return *context_; }

 private:
  const std::shared_ptr<const DeviceContext> context_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;  ///< LOCK: mutex_
};

/// A point of one stream. Recorded once, by whoever makes it, before anybody else sees it. The handle
/// goes back to the pool with it: a wait that was enqueued keeps the point that it saw, so recording the
/// handle again later moves nothing.
class CudaEvent final : public Event {
 public:
  explicit CudaEvent(std::shared_ptr<EventPool> pool) : pool_(std::move(pool)), event_(pool_->take()) {}
  ~CudaEvent() override { pool_->give_back(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cudaStream_t stream);
  bool done() const noexcept override;
  /// True if done() has said so before: no call is made.
  bool known_done() const noexcept { return done_.load(std::memory_order_acquire); }
  cudaEvent_t handle() const noexcept { return event_; }

  /// Set for the end of a copy with staged pieces: its reads (Note [A staged copy]).
  std::shared_ptr<Reads> reads;

 private:
  const std::shared_ptr<EventPool> pool_;
  const cudaEvent_t event_;
  mutable std::atomic<bool> done_{false};
};

}  // namespace dynswap
