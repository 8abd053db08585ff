// A CUDA backend over the pretend device, and a consumer of what it copies.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "cuda/cuda_backend.h"
#include "master_memory.h"
#include "pretend_gpu.h"

namespace dynswap::test {

inline std::atomic<bool> slow_readers{false};  ///< those that cast

inline void cast_by_reader(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count) {
  if (slow_readers) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  gpu::cast(dst, dst_type, src, src_type, count);
}

inline CudaOptions options_with_small_ring() {
  CudaOptions options;
  options.cast = &cast_by_reader;
  options.staging_bytes = 1u << 20;
  options.staging_buffers = 2;
  options.readers = 2;
  return options;
}

/// A backend, and at the end the promise that nothing forbidden was done and nothing is left.
struct Fixture {
  explicit Fixture(std::uint64_t seed = 1, pretend::Order order = pretend::Order::mixed) {
    gpu::reset(seed, order);
    allocation_stream = gpu::make_stream();
    CudaOptions options = options_with_small_ring();
    options.allocate = [this](std::size_t bytes) {
      if (bytes > most_bytes) throw OutOfMemory("the test gives no more");
      const std::lock_guard lock(allocating);  // as torch's allocator does: threads copy at once
      Memory block = std::exchange(cached_block, nullptr);
      if (!block) block = gpu::allocate(bytes);
      return StreamMemory{std::move(block), reinterpret_cast<Stream>(allocation_stream)};
    };
    backend = make_cuda_backend(std::move(options));
  }
  ~Fixture() {
    backend.reset();
    for (Lockable& item : pins) {
      if (item.locked) item.held->unlock();
    }
    pins.clear();
    masters.clear();
    gpu::destroy_stream(allocation_stream);
    for (const std::string& what : gpu::violations()) fail(__FILE__, __LINE__, what);
    const pretend::Counts left = gpu::counts();
    EXPECT_EQ(left.events, 0u);
    EXPECT_EQ(left.streams, 0u);
    EXPECT_EQ(left.registered_bytes, 0u);
    EXPECT_EQ(left.contexts, 0u);
    EXPECT_EQ(left.pageable_copies, 0u);
  }

  /// Page-locks sources, moved to where that may be done.
  void lock(std::vector<SourcePtr>& sources) {
    std::vector<Lockable> items;
    for (const SourcePtr& source : sources) {
      masters.push_back(std::make_unique<MasterMemory>(source->extent()));
      Lockable item = masters.back()->lockable();
      auto moved = std::make_shared<Source>(*source);
      std::memcpy(masters.back()->data(), source->address, source->extent());
      moved->address = masters.back()->data();
      moved->owner = item.held;
      item.source = std::move(moved);
      items.push_back(std::move(item));
    }
    PinnedCopies copies;
    EXPECT_EQ(pin(0, copies, items), "");
    for (std::size_t i = 0; i < sources.size(); ++i) {
      sources[i] = std::move(items[i].source);
      EXPECT(sources[i]->pinned);
      if (items[i].locked) pins.push_back(std::move(items[i]));
    }
  }
  SourcePtr pinned(SourcePtr source) {
    std::vector<SourcePtr> sources{std::move(source)};
    lock(sources);
    return sources[0];
  }

  cudaStream_t allocation_stream = nullptr;
  std::mutex allocating;
  Memory cached_block;                ///< what the allocator hands out next, if anything
  std::size_t most_bytes = SIZE_MAX;  ///< that the allocator has in one block
  std::unique_ptr<Backend> backend;
  std::vector<std::unique_ptr<MasterMemory>> masters;
  std::vector<Lockable> pins;  ///< without their sources
};

/// A consumer's stream that goes with its object.
struct Consumer {
  Consumer() : handle(gpu::make_stream()) {}
  ~Consumer() { gpu::destroy_stream(handle); }
  Stream stream() const { return reinterpret_cast<Stream>(handle); }
  void enqueue(std::function<void()> work) const { gpu::enqueue(handle, std::move(work)); }
  void finish() const { gpu::finish(handle); }
  cudaStream_t handle;
};

inline CopyRequest whole(const SourcePtr& source, std::byte* dst, std::vector<EventPtr> after = {}) {
  CopyRequest request;
  request.steps.push_back({std::move(after), {{source, 0, source->count, dst}}});
  return request;
}

}  // namespace dynswap::test
