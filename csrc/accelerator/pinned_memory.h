// torch's pinned memory, for devices that have it.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>

namespace dynswap {

/// Whether torch can pin host memory for the device. Copies from pinned memory are asynchronous.
bool has_pinned_memory(const c10::Device& device) noexcept;

/// `bytes` of host memory for staging, pinned if `pinned`. Throws OutOfMemory.
std::shared_ptr<std::byte> staging_memory(const c10::Device& device, bool pinned, std::size_t bytes);

}  // namespace dynswap
