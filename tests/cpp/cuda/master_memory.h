// Memory as masters lie in it: blocks that know how they are freed, on pages of their own.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "check.h"
#include "core/lockable.h"
#include "cuda/cuda_backend.h"
#include "lockable_memory.h"
#include "platform/memory.h"
#include "pretend_gpu.h"

namespace dynswap::test {

inline const std::size_t kPage = page_size();

/// As a storage of torch: it frees its memory by its context. Its bytes begin behind a header, as malloc's
/// do. Freed while a page is locked, it fails the test.
class MasterMemory {
 public:
  static constexpr std::size_t kHeader = 64;

  explicit MasterMemory(std::size_t bytes) : bytes_(bytes) {
    auto block = std::make_unique<Block>();
    block->bytes = (kHeader + bytes + kPage - 1) / kPage * kPage;
    block->address = static_cast<std::byte*>(map_memory(block->bytes));
    data_ = block->address + kHeader;
    pages_ = block->bytes / kPage;
    context = HeldBytes::Context(block.release(), &free_block);
  }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  std::size_t pages() const { return pages_; }

  /// All of it.
  Lockable lockable() { return lockable_memory(context, data_, bytes_); }

  HeldBytes::Context context{nullptr, nullptr};

  static void free_block(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    for (std::size_t at = 0; at < block->bytes; at += kPage) {
      EXPECT(!gpu::is_locked(block->address + at, 1));
    }
    unmap_memory(block->address, block->bytes);
  }

 private:
  struct Block {
    std::byte* address;
    std::size_t bytes;
  };
  std::size_t bytes_;
  std::byte* data_;
  std::size_t pages_;
};

}  // namespace dynswap::test
