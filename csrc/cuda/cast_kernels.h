// Casts on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/scalar.h"

namespace dynswap {

/// True if launch_cast() can cast into `wanted` (Note [Where a weight is cast] in copy_issuer.h).
constexpr bool device_casts_to(Scalar wanted) noexcept {
  return is_floating(wanted) && wanted != Scalar::f8_e4m3fn;
}

/// What asking for a kernel returns on the current device: cudaErrorNoKernelImageForDevice, if none was
/// compiled for it.
cudaError_t kernels_for_this_device() noexcept;

/// Enqueues on `stream` the cast of `count` elements in device memory. `src` and `dst` do not overlap.
/// Returns what the launch returned.
cudaError_t launch_cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count,
                        cudaStream_t stream) noexcept;

}  // namespace dynswap
