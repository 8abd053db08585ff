// Every CUDA call goes through one of the two macros below.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <string>
#include <string_view>

#include "transfer/usable_devices.h"

namespace dynswap {

/// Throws OutOfMemory or DeviceError with the error's name, the call and the values.
[[noreturn]] void throw_cuda_error(cudaError_t error, const char* call, const std::string& values);

/// Whether CUDA may be called: devices_usable().
inline bool cuda_usable() noexcept { return devices_usable(); }

/// For what cannot throw: an error is cleared, and printed in a debug build.
void ignore_cuda_error(cudaError_t error, const char* call) noexcept;

}  // namespace dynswap

/// Throws if the call fails. The message has the text of the call, so it is written out here. `values` is
/// streamed into the message: "bytes " << bytes.
#define DYNSWAP_CUDA(call, values)                                               \
  do {                                                                           \
    static_assert(std::string_view(#call).starts_with("cuda"));                  \
    const cudaError_t dynswap_error_ = (call);                                   \
    if (dynswap_error_ != cudaSuccess) {                                         \
      std::ostringstream dynswap_values_;                                        \
      dynswap_values_ << values;                                                 \
      ::dynswap::throw_cuda_error(dynswap_error_, #call, dynswap_values_.str()); \
    }                                                                            \
  } while (false)

/// For destructors and close(): never throws, and makes no call where CUDA is not usable any more.
#define DYNSWAP_CUDA_NOEXCEPT(call)                                            \
  do {                                                                         \
    if (::dynswap::cuda_usable()) ::dynswap::ignore_cuda_error((call), #call); \
  } while (false)
