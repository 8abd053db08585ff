// Page-locking: whose pages, how often, and for how long.
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/amount.h"
#include "cuda/cuda_backend.h"
#include "cuda/cuda_device.h"
#include "master_memory.h"
#include "pretend_gpu.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kLarge = 100'000;  // more than gets a copy

/// Of devices that lock nothing in place: there are none here.
PinnedCopies& no_copies() {
  static PinnedCopies none;
  return none;
}

std::size_t registered_pages() { return gpu::counts().registered_bytes / kPage; }

void expect_nothing_left() {
  EXPECT_EQ(registered_pages(), 0u);
  EXPECT_EQ(gpu::counts().contexts, 0u);
  for (const std::string& what : gpu::violations()) fail(__FILE__, __LINE__, what);
}

/// Part of what `memory` holds.
Lockable part_of(MasterMemory& memory, std::size_t first, std::size_t bytes) {
  Lockable item = memory.lockable();
  auto part = std::make_shared<Source>(*item.source);
  part->address += first;
  part->count = bytes;
  item.source = std::move(part);
  return item;
}

/// A session's end.
void unpin(std::vector<Lockable>& items, MasterMemory& memory) {
  for (Lockable& item : items) {
    if (item.locked) item.held->unlock();
    item.held->leave(&memory.context);
  }
  items.clear();
}

/// What code that knows nothing of us gets for a copy to the device.
cudaError_t others_copy(const std::byte* from, std::size_t bytes) {
  const auto device = std::make_shared<const CudaDevice>(0);
  const OnDevice scope(*device);
  const cudaStream_t stream = gpu::make_stream();
  const gpu::Block copied(bytes);
  const cudaError_t error = cudaMemcpyAsync(copied.data(), from, bytes, cudaMemcpyHostToDevice, stream);
  gpu::finish(stream);
  gpu::destroy_stream(stream);
  return error;
}

TEST(pin_locks_a_block_on_pages_of_its_own_as_a_whole) {
  gpu::reset();
  MasterMemory memory(kLarge);
  std::vector<Lockable> items{memory.lockable()};
  EXPECT_EQ(pin(0, no_copies(), items), "");
  EXPECT(items[0].source->pinned && !items[0].source->pinned_copy && items[0].locked);
  EXPECT(items[0].source->address == memory.data());
  EXPECT(gpu::is_locked(memory.data(), memory.bytes()));
  EXPECT_EQ(others_copy(memory.data(), memory.bytes()), cudaSuccess);  // torch's `.to()` of the master
  unpin(items, memory);
  expect_nothing_left();
}

TEST(pin_leaves_pages_alone_that_others_may_share) {
  gpu::reset();
  // A heap: the master, and right behind it a tensor that is none.
  MasterMemory heap(3 * kLarge);
  std::vector<Lockable> items{part_of(heap, 0, kLarge)};
  items[0].own_pages = false;
  const std::string said = pin(0, no_copies(), items);
  EXPECT(!items[0].source->pinned);
  EXPECT(said.find(std::to_string(kLarge)) != std::string::npos);
  EXPECT(said.find("MALLOC_MMAP_THRESHOLD_") != std::string::npos);
  EXPECT_EQ(others_copy(heap.data() + kLarge, 2 * kLarge), cudaSuccess);  // a foreign tensor
  EXPECT_EQ(others_copy(heap.data(), kLarge), cudaSuccess);               // the master
  EXPECT_EQ(registered_pages(), 0u);
  unpin(items, heap);
  expect_nothing_left();
}

TEST(pin_locks_any_block_where_the_driver_tells_bytes_from_pages) {
  gpu::reset();
  gpu::faults().locks_bytes = true;
  MasterMemory heap(3 * kLarge);
  MasterMemory other(kLarge);
  std::vector<Lockable> items{heap.lockable()};
  std::vector<Lockable> others{other.lockable()};
  items[0].own_pages = others[0].own_pages = false;
  EXPECT_EQ(pin(0, no_copies(), items), "");
  EXPECT_EQ(pin(0, no_copies(), others), "");
  EXPECT(items[0].locked && others[0].locked);
  EXPECT_EQ(gpu::counts().registered_bytes, heap.bytes() + other.bytes());
  EXPECT_EQ(others_copy(heap.data(), heap.bytes()), cudaSuccess);
  unpin(items, heap);
  unpin(others, other);
  expect_nothing_left();
}

TEST(pin_says_nothing_of_a_few_bytes_that_cannot_be_locked) {
  gpu::reset();
  MasterMemory most(40 * kLarge);
  MasterMemory heap(kLarge);
  std::vector<Lockable> items{most.lockable()};
  std::vector<Lockable> shared{heap.lockable()};
  shared[0].own_pages = false;
  items.push_back(shared[0]);
  EXPECT_EQ(pin(0, no_copies(), items), "");
  items.pop_back();
  unpin(items, most);
  unpin(shared, heap);
  expect_nothing_left();
}

TEST(pin_gives_a_small_master_a_copy) {
  gpu::reset();
  MasterMemory memory(1000);
  std::vector<Lockable> items{part_of(memory, 0, 500), part_of(memory, 500, 300)};
  EXPECT_EQ(pin(0, no_copies(), items), "");
  EXPECT_EQ(registered_pages(), 0u);
  for (const Lockable& item : items) {
    EXPECT(item.source->pinned && !item.locked && item.source->pinned_copy);
    EXPECT(gpu::is_locked(item.source->pinned_copy->bytes.get(), item.source->count));
  }
  EXPECT(items[0].source->pinned_copy->bytes.get() + 500 <= items[1].source->pinned_copy->bytes.get());
  EXPECT_EQ(others_copy(memory.data(), memory.bytes()), cudaSuccess);
  unpin(items, memory);
  expect_nothing_left();
}

TEST(pin_locks_a_block_once_for_all_that_lie_in_it) {
  gpu::reset();
  MasterMemory memory(3 * kLarge);
  std::vector<Lockable> items{part_of(memory, 100, 200), part_of(memory, kLarge, kLarge),
                              part_of(memory, 2 * kLarge, kLarge)};
  EXPECT_EQ(pin(0, no_copies(), items), "");
  EXPECT_EQ(registered_pages(), memory.pages());
  for (const Lockable& item : items) EXPECT(item.source->pinned && item.locked && !item.source->pinned_copy);
  unpin(items, memory);
  expect_nothing_left();
}

TEST(pin_is_shared_by_sessions) {
  gpu::reset();
  MasterMemory memory(kLarge);
  std::vector<Lockable> first{memory.lockable()};
  std::vector<Lockable> second{memory.lockable()};
  pin(0, no_copies(), first);
  pin(0, no_copies(), second);
  EXPECT(first[0].locked && second[0].locked);
  unpin(first, memory);
  EXPECT(gpu::is_locked(memory.data(), memory.bytes()));
  unpin(second, memory);
  EXPECT(memory.context.get_deleter() == &MasterMemory::free_block);
  expect_nothing_left();
}

TEST(pin_uses_what_somebody_else_has_locked) {
  gpu::reset();
  MasterMemory memory(kLarge);
  MasterMemory small(100);
  const auto device = std::make_shared<const CudaDevice>(0);
  {
    const OnDevice scope(*device);
    EXPECT_EQ(cudaHostRegister(memory.data(), memory.bytes(), 0), cudaSuccess);
    EXPECT_EQ(cudaHostRegister(small.data(), small.bytes(), 0), cudaSuccess);
  }
  const std::size_t before = registered_pages();
  std::vector<Lockable> items{memory.lockable()};
  std::vector<Lockable> others{small.lockable()};
  items.push_back(others[0]);
  EXPECT_EQ(pin(0, no_copies(), items), "");
  for (const Lockable& item : items) EXPECT(item.source->pinned && !item.locked && !item.source->pinned_copy);
  items.pop_back();
  unpin(items, memory);
  unpin(others, small);
  EXPECT_EQ(registered_pages(), before);
  const OnDevice scope(*device);
  cudaHostUnregister(memory.data());
  cudaHostUnregister(small.data());
}

TEST(pin_refused_is_said_once_and_leaves_no_error_behind) {
  gpu::reset();
  gpu::faults().register_at_most = 30 * kPage;
  MasterMemory fits(kLarge);
  MasterMemory does_not(kLarge + 1);
  std::vector<Lockable> items{fits.lockable()};
  std::vector<Lockable> refused{does_not.lockable()};
  items.push_back(refused[0]);
  const std::string said = pin(0, no_copies(), items);
  EXPECT(items[0].source->pinned);
  EXPECT(!items[1].source->pinned && !items[1].locked);
  EXPECT(said.find(std::to_string(kLarge + 1)) != std::string::npos);
  EXPECT(said.find("after it had locked " + amount(kLarge)) != std::string::npos);
  EXPECT(said.find("after it had locked " + amount(kLarge) + ": ") != std::string::npos);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  items.pop_back();
  unpin(items, fits);
  unpin(refused, does_not);
  expect_nothing_left();
}

TEST(pin_without_memory_for_copies) {
  gpu::reset();
  gpu::faults().no_host_memory = true;
  MasterMemory memory(1000);
  std::vector<Lockable> items{memory.lockable()};
  EXPECT(pin(0, no_copies(), items).find("refused") != std::string::npos);
  EXPECT(!items[0].source->pinned);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  unpin(items, memory);
  expect_nothing_left();
}

TEST(pin_leaves_files_and_the_already_pinned_alone) {
  gpu::reset();
  MasterMemory memory(kLarge);
  std::vector<Lockable> items{memory.lockable(), memory.lockable(), memory.lockable()};
  auto pinned = std::make_shared<Source>(*items[0].source);
  pinned->pinned = true;
  items[0].source = pinned;
  auto nowhere = std::make_shared<Source>(*items[1].source);
  nowhere->address = nullptr;
  items[1].source = nowhere;
  auto empty = std::make_shared<Source>(*items[2].source);
  empty->count = 0;
  items[2].source = empty;
  EXPECT_EQ(pin(0, no_copies(), items), "");
  EXPECT(items[0].source == pinned && items[1].source == nowhere && items[2].source == empty);
  EXPECT_EQ(registered_pages(), 0u);
  unpin(items, memory);
  expect_nothing_left();
}

// MasterMemory looks, when it is freed, whether a page is still locked.

TEST(pin_ends_before_memory_that_its_storage_lets_go_of) {
  gpu::reset();
  MasterMemory memory(kLarge);
  std::vector<Lockable> items{memory.lockable()};
  pin(0, no_copies(), items);
  const std::weak_ptr<HeldBytes> held = items[0].held;
  items[0].held.reset();
  memory.context.reset();  // `resize_(0)`: a copy may be reading, and the engine has the source
  EXPECT(!held.expired());
  EXPECT(gpu::is_locked(memory.data(), memory.bytes()));
  items.clear();  // the engine has the new one, the copies are over
  EXPECT(held.expired());
  expect_nothing_left();
}

TEST(pin_ends_at_once_where_nothing_reads) {
  gpu::reset();
  MasterMemory memory(kLarge);
  std::vector<Lockable> items{memory.lockable()};
  pin(0, no_copies(), items);
  items.clear();
  EXPECT(gpu::is_locked(memory.data(), memory.bytes()));
  memory.context.reset();
  expect_nothing_left();
}

TEST(pin_from_many_threads) {
  gpu::reset();
  std::vector<std::unique_ptr<MasterMemory>> memories;
  for (int i = 0; i < 3; ++i) memories.push_back(std::make_unique<MasterMemory>(kLarge));
  std::mutex gil;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (std::size_t k = 0; k < 100; ++k) {
        MasterMemory& memory = *memories[(i + k) % memories.size()];
        std::vector<Lockable> items;
        {
          const std::lock_guard lock(gil);
          items.push_back(memory.lockable());
        }
        pin(0, no_copies(), items);
        EXPECT(items[0].locked && gpu::is_locked(memory.data(), memory.bytes()));
        items[0].held->unlock();
        const std::lock_guard lock(gil);
        items[0].held->leave(&memory.context);
        items.clear();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& memory : memories) {
    EXPECT(memory->context.get_deleter() == &MasterMemory::free_block);
  }
  expect_nothing_left();
}

}  // namespace
