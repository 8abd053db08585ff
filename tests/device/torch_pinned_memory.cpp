// torch's allocator of pinned memory, over the pretend machine.
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch_device.h"

namespace pretend {

namespace {

struct Block {
  void* address;
  std::vector<PointPtr> users;
};

/// Memory is given back when the copies that were asked of it are over, as far as torch has noted them.
struct PinnedAllocator final : c10::Allocator {
  static PinnedAllocator& one() {
    static auto* const all = new PinnedAllocator;
    return *all;
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* const memory = allocate_pinned(bytes);
    TORCH_CHECK(memory != nullptr, c10::DeviceTypeName(kType), " error: out of memory");
    auto* const block = new Block{memory, {}};
    const std::lock_guard lock(mutex);
    blocks.insert(block);
    by_address[block->address] = block;
    return {block->address, block, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  /// As in torch: a block is known by the context of a storage, or by its first address. A storage that
  /// somebody made over the middle of a block has neither.
  void used(const void* address, const void* context, Stream& stream) {
    const std::lock_guard lock(mutex);
    if (const auto found = blocks.find(static_cast<Block*>(const_cast<void*>(context)));
        found != blocks.end()) {
      (*found)->users.push_back(record(stream));
    } else if (const auto at = by_address.find(address); at != by_address.end()) {
      at->second->users.push_back(record(stream));
    }
  }
  static void give_back(void* context) {
    auto* const block = static_cast<Block*>(context);
    {
      const std::lock_guard lock(one().mutex);
      one().blocks.erase(block);
      one().by_address.erase(block->address);
    }
    free_pinned(block->address, std::move(block->users));
    delete block;
  }
  std::mutex mutex;
  // LOCK: mutex, all below.
  std::unordered_set<Block*> blocks;
  std::unordered_map<const void*, Block*> by_address;
};

}  // namespace

at::Allocator& pinned_allocator() { return PinnedAllocator::one(); }

void note_pinned_use(const void* address, const void* context, Stream& stream) {
  PinnedAllocator::one().used(address, context, stream);
}

}  // namespace pretend
