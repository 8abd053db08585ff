// torch's pinned memory, where a device has it.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>

namespace dynswap {

/// Whether torch pins host memory for the device: its copies from there are asynchronous.
bool has_pinned_memory(const c10::Device& device) noexcept;

/// `bytes` of host memory for staging, pinned if `pinned`. Throws OutOfMemory.
std::shared_ptr<std::byte> staging_memory(const c10::Device& device, bool pinned, std::size_t bytes);

}  // namespace dynswap
