// torch's two allocators over the pretend machine: device memory, cached, and pinned memory.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "torch_device.h"
#include "torch_free_memory.h"

namespace pretend {

namespace {

struct Block {
  void* address;
  std::size_t bytes;
  std::size_t asked;  ///< of them, by who has it now: what the statistics count, as torch's splits blocks
  int device;
  Stream* stream;  ///< that it was allocated for
  std::vector<Stream*> used_on;
  Block *before = nullptr, *behind = nullptr;  ///< in its segment, if there are segments
  bool idle = false;                           ///< kept, and not handed out
  bool small = false;                          ///< of the segments for small blocks
  bool of_graph = false;  ///< allocated inside a capture, whose replays use it: it is never handed out again
};

class CachingAllocator : public Allocator {
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

 protected:
  virtual bool runs_callbacks() const { return true; }

 private:
  using Stat = c10::CachingAllocator::Stat;
  using Place =
      std::pair<std::size_t, void*>;  ///< of what is free the smallest is taken, at the lowest address

  static Place place_of(const Block& block) { return {block.bytes, block.address}; }

  std::vector<Stat*> all(int device) {
    auto& stats = stats_[device];
    return {&stats.allocation[0], &stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0],
            &stats.active[0],     &stats.requested_bytes[0], &stats.segment[0]};
  }
  std::size_t reserved(int device) const { return stats_[device].reserved_bytes[0].current; }

  /// What is freed while an allocation is under way, by a callback of torch_free_memory.h, keeps its bytes
  /// until somebody else may be given it: the allocation itself does not write to it.
  struct UnderWay {
    explicit UnderWay(CachingAllocator& of) : allocator(of) { ++allocator.under_way_; }
    ~UnderWay() {
      if (--allocator.under_way_ > 0) return;
      for (const auto& [address, range] : std::exchange(allocator.to_poison_, {}))
        poison(*range.second, address, range.first);
    }
    CachingAllocator& allocator;
  };

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
    if (under_way_ > 0) {
      to_poison_.try_emplace(static_cast<char*>(block->address), block->bytes, block->stream);
    } else {
      poison(*block->stream, block->address, block->bytes);
    }
    stats_[block->device].active_bytes[0].decrease(block->asked);
    if (block->behind != nullptr && block->behind->idle) join(block, block->behind);
    if (block->before != nullptr && block->before->idle) block = join(block->before, block);
    forget(block);
    block->idle = true;
    free_[{block->stream, block->small}].emplace(place_of(*block), block);
  }

  /// `second`, which is behind `first`, becomes a part of it. Of the two one may be in use.
  Block* join(Block* first, Block* second) {
    forget(first);
    forget(second);
    first->bytes += second->bytes;
    first->behind = second->behind;
    if (first->behind != nullptr) first->behind->before = first;
    delete second;
    return first;
  }

  void forget(Block* block) {
    if (!std::exchange(block->idle, false)) return;
    free_[{block->stream, block->small}].erase(place_of(*block));
  }

  /// Note [Segments]
  /// As in torch: what is asked of the driver is larger than what is asked for, what is left of a block is
  /// another one, and blocks that are next to each other become one again when both are free. Memory is the
  /// driver's again only if all of a segment is free. Faults::segment_bytes is torch's 2 MiB.
  static std::size_t segment_of(std::size_t bytes) {
    const std::size_t unit = faults().segment_bytes;
    if (unit == 0) return bytes;
    if (bytes <= unit / 2) return unit;
    return bytes < 5 * unit ? 10 * unit : (bytes + unit - 1) / unit * unit;
  }

  /// Keeps what the block has beyond `bytes` as a free block.
  void split(Block* block, std::size_t bytes) {
    const std::size_t unit = faults().segment_bytes, left = block->bytes - bytes;
    if (unit == 0 || (block->small ? left < 512 : left <= unit / 2)) return;
    void* const address = static_cast<char*>(block->address) + bytes;
    auto* const rest = new Block{address, left, 0, block->device, block->stream, {}, block, block->behind};
    rest->small = block->small;
    if (rest->behind != nullptr) rest->behind->before = rest;
    block->behind = rest;
    block->bytes = bytes;
    rest->idle = true;
    free_[{rest->stream, rest->small}].emplace(place_of(*rest), rest);
  }

  /// The block was handed out again: its bytes stay as they are.
  void keep_as_it_is(const Block& block) {
    char* const from = static_cast<char*>(block.address);
    char* const to = from + block.bytes;
    auto range = to_poison_.lower_bound(from);
    if (range != to_poison_.begin()) --range;
    while (range != to_poison_.end() && range->first < to) {
      const auto [begin, rest] = *range;
      char* const end = begin + rest.first;
      if (end <= from) {
        ++range;
        continue;
      }
      range = to_poison_.erase(range);
      if (begin < from) to_poison_.emplace(begin, std::pair(std::size_t(from - begin), rest.second));
      if (end > to) range = to_poison_.emplace(to, std::pair(std::size_t(end - to), rest.second)).first;
    }
  }

  /// As torch's: what is kept, the callbacks, the driver, what is kept once more when all of that is its
  /// again; and the profiler hears of the outcome. Its lock is held from the first to the last.
  Block* take(int device, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const UnderWay under_way(*this);
    Stream& stream = current_stream(device);
    Block* block = kept(stream, device, bytes);
    if (block == nullptr && runs_callbacks() && run_free_memory_callbacks())
      block = kept(stream, device, bytes);
    if (block == nullptr) block = fresh(stream, device, bytes);
    if (block == nullptr) {
      ++stats_[device].num_alloc_retries;
      checked([&] { synchronise_device(device, "the allocator, which is out of memory"); });
      trim(device);
      block = fresh(stream, device, bytes);
    }
    const auto in_use = [&](std::size_t more) {
      return static_cast<std::size_t>(stats_[device].allocated_bytes[0].current) + more;
    };
    if (block != nullptr) {
      count(*block);
      c10::reportMemoryUsageToProfiler(block->address, static_cast<std::int64_t>(bytes), in_use(0),
                                       reserved(device), device_at(device));
      return block;
    }
    ++stats_[device].num_ooms;
    c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(bytes), in_use(bytes), reserved(device),
                                     device_at(device));
    TORCH_CHECK_WITH(OutOfMemoryError, false, c10::DeviceTypeName(kType),
                     " out of memory. Tried to allocate ", bytes / 1048576.0, " MiB. GPU ", device,
                     " has a total capacity of ", total(device) / 1048576.0, " MiB of which ",
                     (cap(device) - std::min(cap(device), reserved(device))) / 1048576.0, " MiB is free.");
  }

  /// A block that is kept for the stream; null if none fits.
  Block* kept(Stream& stream, int device, std::size_t bytes) {
    settle();
    const std::size_t unit = faults().segment_bytes;
    auto& free = free_[{&stream, bytes <= unit / 2}];
    const auto found = free.lower_bound({bytes, nullptr});
    if (capturing(stream) || found == free.end()) return nullptr;
    Block* const block = found->second;
    if (unit == 0 && block->bytes > 2 * bytes) return nullptr;
    block->asked = bytes;
    block->idle = false;
    free.erase(found);
    split(block, bytes);
    keep_as_it_is(*block);
    return block;
  }

  /// A block of the driver's; null if it has none.
  Block* fresh(Stream& stream, int device, std::size_t bytes) {
    const std::size_t whole = capturing(stream) ? bytes : segment_of(bytes);
    if (reserved(device) + whole > cap(device)) return nullptr;
    // torch's allocator relaxes the capture only where the stream that it allocates for is captured.
    TORCH_CHECK(capturing(stream) || !capture_forbids("cudaMalloc"),
                "CUDA error: operation not permitted when stream is capturing");
    void* const address = reserve(device, whole);
    if (address == nullptr) return nullptr;
    stats_[device].reserved_bytes[0].increase(whole);
    stats_[device].segment[0].increase(1);
    ++stats_[device].num_device_alloc;
    auto* const block = new Block{address, whole, bytes, device, &stream, {}};
    block->of_graph = capturing(stream);
    block->small = bytes <= faults().segment_bytes / 2;
    if (!block->of_graph) split(block, bytes);
    return block;
  }

  void count(Block& block) {
    auto& stats = stats_[block.device];
    live_[block.address] = &block;
    stats.allocation[0].increase(1);
    stats.active[0].increase(1);
    stats.allocated_bytes[0].increase(block.asked);
    stats.active_bytes[0].increase(block.asked);
    stats.requested_bytes[0].increase(block.asked);
  }

  std::size_t idle_bytes(int device) {
    const std::lock_guard lock(mutex_);
    settle();
    std::size_t bytes = 0;
    for (const auto& [stream, blocks] : free_) {
      for (const auto& [place, block] : blocks) bytes += block->device == device ? block->bytes : 0;
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
        if (block->device != device || block->before != nullptr || block->behind != nullptr) return false;
        if (!std::exchange(poisoned, true)) synchronise_poison(device);
        keep_as_it_is(*block);
        release(device, block->address, block->bytes);
        ++stats_[device].num_device_free;
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

  std::recursive_mutex mutex_;
  // LOCK: mutex_, all below.
  int under_way_ = 0;                                           ///< allocations, one inside the other
  std::map<char*, std::pair<std::size_t, Stream*>> to_poison_;  ///< bytes at an address
  std::unordered_map<const void*, Block*> live_;
  std::map<std::pair<Stream*, bool>, std::map<Place, Block*>> free_;  ///< small ones apart
  std::vector<std::pair<std::vector<PointPtr>, Block*>> pending_;
  c10::CachingDeviceAllocator::DeviceStats stats_[kDevices];
  std::size_t caps_[kDevices]{SIZE_MAX, SIZE_MAX};
};

/// The other allocator of torch, which runs no callbacks.
struct CudaMallocAsyncAllocator final : CachingAllocator {
  bool runs_callbacks() const override { return false; }
};

CachingAllocator& caching() {
  static CachingAllocator* const one = []() -> CachingAllocator* {
    const char* const settings = std::getenv("PYTORCH_ALLOC_CONF");
    const bool other = settings != nullptr && std::strstr(settings, "backend:cudaMallocAsync") != nullptr;
    return other ? new CudaMallocAsyncAllocator : new CachingAllocator;
  }();
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
