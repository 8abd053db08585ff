// torch's pinned memory, for devices that have it, and masters that are page-locked for one.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/lockable.h"
#include "transfer/pinned_copies.h"

namespace dynswap {

/// Whether torch can pin host memory for the device. Copies from pinned memory are asynchronous.
bool has_pinned_memory(const c10::Device& device) noexcept;

/// `bytes` of host memory for staging, pinned if `pinned`. Throws OutOfMemory.
std::shared_ptr<std::byte> staging_memory(const c10::Device& device, bool pinned, std::size_t bytes);

/// Locks a block in place for the device, for as long as the result lives; null, and why in `reason`, if that
/// is refused.
using HostRegister =
    std::function<std::shared_ptr<void>(std::byte* block, std::size_t bytes, std::string& reason)>;

/// page_lock() through torch: a master that is pinned already, or that `host_register` (which may be null)
/// locks, is copied from where it lies.
std::string pin_through_torch(const c10::Device& device, const HostRegister& host_register,
                              PinnedCopies& copies, std::vector<Lockable>& items);

}  // namespace dynswap
