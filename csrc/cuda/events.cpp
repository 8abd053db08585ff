#include "cuda/events.h"

#include <exception>
#include <new>

#include "cuda/cuda_check.h"

namespace dynswap {

EventPool::~EventPool() {
  for (cudaEvent_t event : free_) DYNSWAP_CUDA_NOEXCEPT(cudaEventDestroy(event));
}

cudaEvent_t EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  const ContextGuard guard(*context_);
  cudaEvent_t event = nullptr;
  DYNSWAP_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "");
  return event;
}

void EventPool::give_back(cudaEvent_t event) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
    return;
  } catch (const std::bad_alloc&) {
  }
  DYNSWAP_CUDA_NOEXCEPT(cudaEventDestroy(event));
}

void CudaEvent::record(cudaStream_t stream) {
  DYNSWAP_CUDA(cudaEventRecord(event_, stream), "stream " << static_cast<const void*>(stream));
}

bool CudaEvent::done() const noexcept {
  if (known_done()) return true;
  if (!cuda_usable()) return true;
  cudaError_t state = cudaSuccess;
  try {
    const ContextGuard guard(pool_->context());
    state = cudaEventQuery(event_);
  } catch (const std::exception&) {
    return true;  // the device is lost
  }
  if (state == cudaErrorNotReady) {
    // "not yet" is remembered as if it were an error
    (void)cudaGetLastError();
    return false;
  }
  // An error that a device cannot recover from ends everything that was enqueued, too.
  ignore_cuda_error(state, "cudaEventQuery");
  done_.store(true, std::memory_order_release);
  return true;
}

}  // namespace dynswap
