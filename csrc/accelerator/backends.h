// Which backend serves a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "accelerator/pinned_memory.h"
#include "core/backend.h"
#include "core/lockable.h"
#include "transfer/pinned_copies.h"

namespace dynswap {

/// The backend for `device`; `wanted` is "host", "cuda", "torch", or "auto" for the best of them. Throws
/// Error if there is none in this build. `warn` is called with what makes the backend slower than it could
/// be.
std::unique_ptr<Backend> make_backend(const at::Device& device, const std::string& wanted,
                                      const std::function<void(const std::string&)>& warn);

/// Page-locks for the backend of this name on `device`; for torch's by `host_register`, which may be null. No
/// effect for backends that do not page-lock. Without the GIL. Returns what is to be told the user.
std::string pin_items(const at::Device& device, const std::string& backend, const HostRegister& host_register,
                      PinnedCopies& copies, std::vector<Lockable>& items);

/// The version of the CUDA runtime that is linked, "13.0" for instance; empty in a build without CUDA.
std::string cuda_version();

/// How many CUDA devices the native provider can serve; 0 in a build without CUDA. Wakes the driver: see
/// cuda/cuda_backend.h. Throws DeviceError where the runtime cannot say.
int device_count();

}  // namespace dynswap
