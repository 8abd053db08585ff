#include "cuda/events.h"

#include <exception>
#include <mutex>
#include <new>

#include "cuda/cuda_check.h"
#include "transfer/device_errors.h"

namespace dynswap {

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

DeviceClock::~DeviceClock() { DYNSWAP_CUDA_NOEXCEPT(cudaEventDestroy(zero_)); }

std::optional<std::int64_t> DeviceClock::time_of(cudaEvent_t event) const noexcept {
  float milliseconds = 0;
  try {
    const ContextGuard guard(*context_);
    const cudaError_t state = cudaEventElapsedTime(&milliseconds, zero_, event);
    if (state != cudaSuccess) {
      (void)cudaGetLastError();
      return std::nullopt;
    }
  } catch (const std::exception&) {
    return std::nullopt;  // the device is lost
  }
  return host_ns_ + static_cast<std::int64_t>(1e6 * static_cast<double>(milliseconds));
}

EventPool::~EventPool() {
  for (const auto& events : free_) {
    for (cudaEvent_t event : events) DYNSWAP_CUDA_NOEXCEPT(cudaEventDestroy(event));
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
  DYNSWAP_CUDA_NOEXCEPT(cudaEventDestroy(event));
}

void CudaEvent::record(cudaStream_t stream) {
  DYNSWAP_CUDA(cudaEventRecord(event_, stream), "stream " << static_cast<const void*>(stream));
}

std::optional<Interval> CudaEvent::when() const noexcept {
  if (!clock_ || !cuda_usable() || !done()) return std::nullopt;
  const std::optional<std::int64_t> end = clock_->time_of(event_);
  const std::optional<std::int64_t> first = begin ? clock_->time_of(begin->event_) : end;
  if (!end || !first) return std::nullopt;
  return Interval{*first, *end};
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
