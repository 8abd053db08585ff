// Which backend serves a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"

namespace dynswap {

/// The backend for `device`; `wanted` is "auto", "host" or "cuda". Throws Error if there is none in this
/// build.
std::unique_ptr<Backend> make_backend(const at::Device& device, const std::string& wanted);

/// Page-locks the sources that lie in RAM, as far as the system allows, and replaces them by ones that say
/// so. What it returns keeps them page-locked. Null where pinning means nothing. `refused` is given the
/// reason, once, if the system refuses some.
std::shared_ptr<void> pin_sources(const at::Device& device, std::vector<SourcePtr>& sources,
                                  const std::function<void(const std::string&)>& refused);

/// Of the CUDA runtime that is linked, "13.0" for instance; empty in a build without CUDA.
std::string cuda_version();

}  // namespace dynswap
