#include "tensor/small_blocks.h"

#include <array>
#include <mutex>
#include <new>

#include "platform/fork_safe.h"
#include "platform/memory.h"
#include "platform/process.h"

namespace dynswap {

namespace {

constexpr std::size_t kStep = 32;         ///< bytes; sizes are rounded up to a multiple of this
constexpr std::size_t kLargest = 1024;    ///< bytes; larger objects come from the heap
constexpr std::size_t kSlab = 64u << 10;  ///< bytes that are mapped at a time

/// The free blocks of each size. Never destroyed: tensors may outlive static objects.
class Blocks {
 public:
  static Blocks& get() {
    static auto* const blocks = new Blocks;
    // A fork waits until no other thread is in the middle of a change, which the child would keep for good.
    static const bool follows_forks = at_fork([] { blocks->mutex_.lock(); }, [] { blocks->mutex_.unlock(); },
                                              [] { blocks->mutex_.unlock(); });
    static_cast<void>(follows_forks);
    return *blocks;
  }

  void* take(std::size_t size) {
    const std::lock_guard lock(mutex_);
    Free*& free = free_[size / kStep];
    if (free == nullptr) add_slab(size);
    Free* const block = free;
    free = block->next;
    return block;
  }

  void give_back(void* block, std::size_t size) noexcept {
    const std::lock_guard lock(mutex_);
    Free*& free = free_[size / kStep];
    free = new (block) Free{free};
  }

 private:
  struct Free {
    Free* next;
  };

  void add_slab(std::size_t size) {
    void* const slab = map_memory(kSlab);
    if (slab == nullptr) throw std::bad_alloc();
    Free*& free = free_[size / kStep];
    for (std::size_t at = kSlab / size; at-- > 0;)
      free = new (static_cast<std::byte*>(slab) + at * size) Free{free};
  }

  Mutex mutex_;
  std::array<Free*, kLargest / kStep + 1> free_{};  ///< LOCK: mutex_; by size in steps
};

std::size_t rounded(std::size_t bytes) noexcept { return (bytes + kStep - 1) / kStep * kStep; }

}  // namespace

void* OutsideTheHeap::operator new(std::size_t bytes) {
  return bytes > kLargest ? ::operator new(bytes) : Blocks::get().take(rounded(bytes));
}

void OutsideTheHeap::operator delete(void* block, std::size_t bytes) noexcept {
  if (block == nullptr) return;
  bytes > kLargest ? ::operator delete(block) : Blocks::get().give_back(block, rounded(bytes));
}

}  // namespace dynswap
