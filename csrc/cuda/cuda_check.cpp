#include "cuda/cuda_check.h"

#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "core/check.h"

namespace dynswap {
namespace {

std::atomic<bool> usable{true};

void forbid() noexcept { usable.store(false, std::memory_order_relaxed); }

}  // namespace

bool cuda_usable() noexcept { return usable.load(std::memory_order_relaxed); }

void watch_process() noexcept {
  // Registered after the CUDA runtime's own handlers, so it runs before they take the driver away.
  static const int registered = [] {
    std::atexit(forbid);
    return pthread_atfork(nullptr, nullptr, forbid);
  }();
  (void)registered;
}

void throw_cuda_error(cudaError_t error, const char* call, const std::string& values) {
  // The runtime remembers the error and would report it at the next, innocent call.
  (void)cudaGetLastError();
  std::ostringstream message;
  message << cudaGetErrorName(error) << " (" << cudaGetErrorString(error) << ") in " << call;
  if (!values.empty()) message << " with " << values;
  if (error == cudaErrorMemoryAllocation) throw OutOfMemory(message.str());
  throw DeviceError(message.str());
}

bool ends_all_work(cudaError_t error) noexcept {
  switch (error) {
    case cudaErrorCudartUnloading:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

void ignore_cuda_error(cudaError_t error, [[maybe_unused]] const char* call) noexcept {
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  (void)cudaGetLastError();
#ifndef NDEBUG
  std::fprintf(stderr, "dynswap: %s in %s\n", cudaGetErrorName(error), call);
#endif
}

}  // namespace dynswap
