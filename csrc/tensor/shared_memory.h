// Tensors in memory that processes share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace dynswap {

/// Maps `bytes` of an open file, from `offset` (a multiple of the page size) on, as a tensor with a storage
/// of its own. Nothing else is on its pages in this process, so an engine may page-lock them. Throws
/// c10::Error if they cannot be mapped.
at::Tensor map_shared_tensor(int file, std::uint64_t offset, std::size_t bytes);

/// Bytes of map_shared_tensor(), by what processes that share them have in common.
struct SharedPlace {
  std::uint64_t inode = 0;
  std::uint64_t offset = 0;  ///< bytes
};

/// Where in which file these bytes are; nothing if they are not from map_shared_tensor().
std::optional<SharedPlace> shared_place(const std::byte* address, std::size_t bytes);

/// Whether memory that is freed in this way is from map_shared_tensor().
bool frees_shared_memory(void (*deleter)(void*)) noexcept;

}  // namespace dynswap
