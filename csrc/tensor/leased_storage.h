// Storages of bytes that an engine has brought, and that no record tells of: what was saved for backward.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>

#include "core/engine.h"

namespace dynswap {

/// The storage holds the lease until it dies.
c10::Storage leased_storage(Lease lease, std::size_t bytes, const c10::Device& device);

/// The lease of such a storage; null for any other.
Lease* lease_of(const c10::StorageImpl& storage) noexcept;

}  // namespace dynswap
