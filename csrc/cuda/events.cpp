#include "cuda/events.h"

#include <exception>
#include <mutex>
#include <new>

#include "cuda/cuda_check.h"
#include "transfer/device_errors.h"

namespace dynswap {
namespace {

/// In the device's context: without one the runtime would make one, on the thread's device, whichever that
/// is.
void destroy(const DeviceContext& context, cudaEvent_t event) noexcept {
  if (!cuda_usable()) return;
  try {
    const ContextGuard guard(context);
    DYNSWAP_CUDA_NOEXCEPT(cudaEventDestroy(event));
  } catch (const std::exception&) {
    // the device is lost, and its events with it
  }
}

}  // namespace

DeviceClock::DeviceClock(std::shared_ptr<const DeviceContext> context, cudaStream_t stream)
    : context_(std::move(context)) {
  const ContextGuard guard(*context_);
  DYNSWAP_CUDA(cudaEventCreateWithFlags(&zero_, cudaEventDefault), "");
  try {
    DYNSWAP_CUDA(cudaEventRecord(zero_, stream), "");
    DYNSWAP_CUDA(cudaEventSynchronize(zero_), "");
  } catch (...) {
    DYNSWAP_CUDA_NOEXCEPT(cudaEventDestroy(zero_));
    throw;
  }
  host_ns_ = monotonic_ns();
}

DeviceClock::~DeviceClock() { destroy(*context_, zero_); }

std::optional<std::int64_t> DeviceClock::between(cudaEvent_t first, cudaEvent_t last) const noexcept {
  float milliseconds = 0;
  try {
    const ContextGuard guard(*context_);
    const cudaError_t state = cudaEventElapsedTime(&milliseconds, first, last);
    if (state != cudaSuccess) {
      (void)cudaGetLastError();
      return std::nullopt;
    }
  } catch (const std::exception&) {
    return std::nullopt;  // the device is lost
  }
  return static_cast<std::int64_t>(1e6 * static_cast<double>(milliseconds));
}

std::optional<Interval> DeviceClock::interval(cudaEvent_t first, cudaEvent_t last) const noexcept {
  const std::optional<std::int64_t> end = between(zero_, last), length = between(first, last);
  if (!end || !length) return std::nullopt;
  return Interval{host_ns_ + *end - *length, host_ns_ + *end};
}

EventPool::~EventPool() {
  for (const auto& events : free_) {
    for (cudaEvent_t event : events) destroy(*context_, event);
  }
}

cudaEvent_t EventPool::take(bool timed) {
  {
    const std::lock_guard lock(mutex_);
    std::vector<cudaEvent_t>& free = free_[timed];
    if (!free.empty()) {
      cudaEvent_t event = free.back();
      free.pop_back();
      return event;
    }
  }
  const ContextGuard guard(*context_);
  cudaEvent_t event = nullptr;
  DYNSWAP_CUDA(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming), "");
  return event;
}

void EventPool::give_back(cudaEvent_t event, bool timed) noexcept {
  if (!cuda_usable()) return;
  try {
    const std::lock_guard lock(mutex_);
    free_[timed].push_back(event);
    return;
  } catch (const std::bad_alloc&) {
  }
  destroy(*context_, event);
}

void CudaEvent::record(cudaStream_t stream) {
  DYNSWAP_CUDA(cudaEventRecord(event_, stream), "stream " << static_cast<const void*>(stream));
}

std::optional<Interval> CudaEvent::when() const noexcept {
  if (!clock_ || !cuda_usable() || !done()) return std::nullopt;
  return clock_->interval(begin ? begin->event_ : event_, event_);
}

bool CudaEvent::done() const noexcept {
  if (known_done()) return true;
  if (!cuda_usable()) return true;
  cudaError_t state = cudaSuccess;
  try {
    const ContextGuard guard(pool_->context());
    state = cudaEventQuery(event_);
  } catch (const std::exception&) {
    return false;  // it was not asked
  }
  // "Not yet" is remembered as if it were an error.
  if (state != cudaSuccess) (void)cudaGetLastError();
  // Whatever else keeps the question from being answered says nothing about the work before the event.
  if (state != cudaSuccess && !ends_all_work(state)) return false;
  done_.store(true, std::memory_order_release);
  return true;
}

}  // namespace dynswap
