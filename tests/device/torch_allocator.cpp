// torch's two allocators over the pretend machine: device memory, cached, and pinned memory.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "torch_device.h"

namespace pretend {

namespace {

struct Block {
  void* address;
  std::size_t bytes;
  std::size_t asked;  ///< of them, by who has it now: what the statistics count, as torch's splits blocks
  int device;
  Stream* stream;  ///< that it was allocated for
  std::vector<Stream*> used_on;
  bool of_graph = false;  ///< allocated inside a capture, whose replays use it: it is never handed out again
};

class CachingAllocator final : public Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const int device = current_device();
    const c10::Device where = device_at(device);
    TORCH_CHECK(!on_device_thread(), "device memory is allocated by queued work");
    if (bytes == 0) return {nullptr, where};
    note_call();
    Block* const block = take(device, (bytes + 511) / 512 * 512);
    return {block->address, block, &give_back, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back_address; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    checked([&] { copy(current_stream(current_device()), to, from, bytes); });
  }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; ++device) {
      if (idle_bytes(device) == 0) continue;
      checked([&] { synchronise_device(device, "empty_cache"); });
      trim(device);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(data.get());
    if (found == live_.end()) return;  // not ours: memory that somebody wrapped
    Block& block = *found->second;
    Stream* const user = &stream_of(stream);
    if (user != block.stream && !std::count(block.used_on.begin(), block.used_on.end(), user)) {
      block.used_on.push_back(user);
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    return stats_[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    for (auto* stat : all(device)) stat->reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    for (auto* stat : all(device)) stat->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    return {total(device) - std::min(total(device), reserved(device)), total(device)};
  }
  void set_cap(int device, std::size_t bytes) override { caps_[device] = bytes; }
  std::size_t cap(int device) const override { return std::min(caps_[device], total(device)); }
  std::size_t total(int) const override { return faults().memory_bytes; }

 private:
  using Stat = c10::CachingAllocator::Stat;

  std::vector<Stat*> all(int device) {
    auto& stats = stats_[device];
    return {&stats.allocation[0], &stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0],
            &stats.active[0],     &stats.requested_bytes[0], &stats.segment[0]};
  }
  std::size_t reserved(int device) const { return stats_[device].reserved_bytes[0].current; }

  /// LOCK held. What was recorded on other streams is freed once they have come so far.
  void settle() {
    for (auto it = pending_.begin(); it != pending_.end();) {
      auto& [points, block] = *it;
      std::erase_if(points, [](const PointPtr& point) { return reached(point); });
      if (!points.empty()) {
        ++it;
        continue;
      }
      put(block);
      it = pending_.erase(it);
    }
  }

  void put(Block* block) {
    poison(*block->stream, block->address, block->bytes);
    free_[block->stream].emplace(block->bytes, block);
    stats_[block->device].active_bytes[0].decrease(block->asked);
  }

  Block* take(int device, std::size_t bytes) {
    Stream& stream = current_stream(device);
    if (Block* const block = try_take(stream, device, bytes)) return block;
    checked([&] { synchronise_device(device, "the allocator, which is out of memory"); });
    trim(device);
    if (Block* const block = try_take(stream, device, bytes)) return block;
    ++stats_[device].num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, c10::DeviceTypeName(kType),
                     " out of memory. Tried to allocate ", bytes / 1048576.0, " MiB. GPU ", device,
                     " has a total capacity of ", total(device) / 1048576.0, " MiB of which ",
                     (cap(device) - std::min(cap(device), reserved(device))) / 1048576.0, " MiB is free.");
  }

  Block* try_take(Stream& stream, int device, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    settle();
    auto& stats = stats_[device];
    auto& free = free_[&stream];
    const auto found = free.lower_bound(bytes);
    Block* block = nullptr;
    const bool captured = capturing(stream);
    if (!captured && found != free.end() && found->first <= 2 * bytes) {
      block = found->second;
      block->asked = bytes;
      free.erase(found);
    } else if (reserved(device) + bytes <= cap(device)) {
      if (void* const address = reserve(device, bytes)) {
        block = new Block{address, bytes, bytes, device, &stream, {}, captured};
        stats.reserved_bytes[0].increase(bytes);
        stats.segment[0].increase(1);
      }
    }
    if (block == nullptr) {
      ++stats.num_alloc_retries;
      return nullptr;
    }
    live_[block->address] = block;
    stats.allocation[0].increase(1);
    stats.active[0].increase(1);
    stats.allocated_bytes[0].increase(block->asked);
    stats.active_bytes[0].increase(block->asked);
    stats.requested_bytes[0].increase(block->asked);
    return block;
  }

  std::size_t idle_bytes(int device) {
    const std::lock_guard lock(mutex_);
    settle();
    std::size_t bytes = 0;
    for (const auto& [stream, blocks] : free_) {
      for (const auto& [size, block] : blocks) bytes += block->device == device ? size : 0;
    }
    return bytes;
  }

  /// The device's streams are idle.
  void trim(int device) {
    const std::lock_guard lock(mutex_);
    settle();
    bool poisoned = false;
    for (auto& [stream, blocks] : free_) {
      std::erase_if(blocks, [&](const auto& entry) {
        Block* const block = entry.second;
        if (block->device != device) return false;
        if (!std::exchange(poisoned, true)) synchronise_poison(device);
        release(device, block->address, block->bytes);
        stats_[device].reserved_bytes[0].decrease(block->bytes);
        stats_[device].segment[0].decrease(1);
        delete block;
        return true;
      });
    }
  }
  /// settle() may just have queued some.
  static void synchronise_poison(int device) {
    const bool forbidden = synchronisation_forbidden();
    if (!forbidden) synchronise_device(device, "the allocator");
  }

  static void give_back(void* context);
  static void give_back_address(void*) { TORCH_CHECK(false, "raw deletes are not served"); }
  void free(Block* block) {
    note_call();
    const std::lock_guard lock(mutex_);
    live_.erase(block->address);
    auto& stats = stats_[block->device];
    stats.allocation[0].decrease(1);
    stats.active[0].decrease(1);
    stats.allocated_bytes[0].decrease(block->asked);
    stats.requested_bytes[0].decrease(block->asked);
    if (block->of_graph) return;
    try {
      if (block->used_on.empty()) return put(block);
      std::vector<PointPtr> points;
      for (Stream* user : block->used_on) points.push_back(record(*user));
      block->used_on.clear();
      pending_.emplace_back(std::move(points), block);
    } catch (const DeviceFault&) {
      // the device has failed: the memory is lost until reset()
    }
  }

  std::mutex mutex_;
  // LOCK: mutex_, all below.
  std::unordered_map<const void*, Block*> live_;
  std::unordered_map<Stream*, std::multimap<std::size_t, Block*>> free_;
  std::vector<std::pair<std::vector<PointPtr>, Block*>> pending_;
  c10::CachingDeviceAllocator::DeviceStats stats_[kDevices];
  std::size_t caps_[kDevices]{SIZE_MAX, SIZE_MAX};
};

CachingAllocator& caching() {
  static auto* const one = new CachingAllocator;
  return *one;
}

void CachingAllocator::give_back(void* context) { caching().free(static_cast<Block*>(context)); }

const bool registered_allocator = [] {
  c10::SetAllocator(kType, &caching(), 100);
  return true;
}();

/// torch's pinned memory: given back when the copies that were asked of it are over.
struct PinnedAllocator final : c10::Allocator {
  struct Block {
    void* address;
    std::vector<PointPtr> users;
  };
  static PinnedAllocator& one() {
    static auto* const all = new PinnedAllocator;
    return *all;
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    auto* const block = new Block{allocate_pinned(bytes), {}};
    const std::lock_guard lock(mutex);
    blocks[reinterpret_cast<std::uintptr_t>(block->address)] = {block, bytes};
    return {block->address, block, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  /// A queued copy uses this memory, if it is ours.
  void used(const void* address, Stream& stream) {
    const std::lock_guard lock(mutex);
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    auto found = blocks.upper_bound(at);
    if (found == blocks.begin()) return;
    --found;
    if (at < found->first + found->second.second) found->second.first->users.push_back(record(stream));
  }
  static void give_back(void* context) {
    auto* const block = static_cast<Block*>(context);
    {
      const std::lock_guard lock(one().mutex);
      one().blocks.erase(reinterpret_cast<std::uintptr_t>(block->address));
    }
    free_pinned(block->address, std::move(block->users));
    delete block;
  }
  std::mutex mutex;
  std::map<std::uintptr_t, std::pair<Block*, std::size_t>> blocks;
};

}  // namespace

Allocator& allocator() { return caching(); }

at::Allocator& pinned_allocator() { return PinnedAllocator::one(); }

void note_pinned_use(const void* address, Stream& stream) { PinnedAllocator::one().used(address, stream); }

}  // namespace pretend
