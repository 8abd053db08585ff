// Which backend serves a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"

namespace dynswap {

/// The backend for `device`; `wanted` is "auto", "host" or "cuda". Throws Error if there is none in this
/// build.
std::unique_ptr<Backend> make_backend(const at::Device& device, const std::string& wanted);

/// Page-locks the sources that lie in RAM, as far as the system allows, and replaces them by ones that say
/// so. What it returns keeps them page-locked. Null where pinning means nothing.
std::shared_ptr<void> pin_sources(const at::Device& device, std::vector<SourcePtr>& sources);

bool compiled_with_cuda() noexcept;
int cuda_devices() noexcept;

}  // namespace dynswap
