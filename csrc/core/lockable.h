// What a backend may page-lock.
#pragma once

#include <cstddef>
#include <memory>

#include "core/held_bytes.h"
#include "core/source.h"

namespace dynswap {

/// A source that might be page-locked, and the block of memory that it lies in.
struct Lockable {
  SourcePtr source;
  std::shared_ptr<HeldBytes> held;  ///< the block; null where that may not be held, so not be locked either
  const std::byte* block = nullptr;
  std::size_t block_bytes = 0;
  bool own_pages = false;  ///< nothing else lies on the block's pages (Note [Pages of one's own])
  bool locked = false;     ///< HeldBytes::unlock() is owed, after the last copy that reads it
};

}  // namespace dynswap
