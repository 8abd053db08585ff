// Casts on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/scalar.h"

namespace dynswap {

/// What asking for a kernel returns on the current device: cudaErrorNoKernelImageForDevice, if none was
/// compiled for it.
cudaError_t kernels_for_this_device() noexcept;

/// Enqueues on `stream` the cast of `count` elements in device memory. `src` and `dst` do not overlap, and
/// device_casts_to(dst_type) (transfer/copy_plan.h) is true. Returns what the launch returned.
cudaError_t launch_cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count,
                        cudaStream_t stream) noexcept;

}  // namespace dynswap
