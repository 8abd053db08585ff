#include "cuda/cuda_check.h"

#include <cstdio>

#include "core/check.h"

namespace dynswap {

void throw_cuda_error(cudaError_t error, const char* call, const std::string& values) {
  // The runtime remembers the error and would report it at the next, innocent call.
  (void)cudaGetLastError();
  std::ostringstream message;
  message << cudaGetErrorName(error) << " (" << cudaGetErrorString(error) << ") in " << call;
  if (!values.empty()) message << " with " << values;
  if (error == cudaErrorMemoryAllocation) throw OutOfMemory(message.str());
  throw DeviceError(message.str());
}

void ignore_cuda_error(cudaError_t error, [[maybe_unused]] const char* call) noexcept {
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  (void)cudaGetLastError();
#ifndef NDEBUG
  std::fprintf(stderr, "dynswap: %s in %s\n", cudaGetErrorName(error), call);
#endif
}

}  // namespace dynswap
