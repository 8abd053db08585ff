// torch's caching allocator of device memory, over the pretend machine.
#include <c10/core/AllocatorConfig.h>

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

/// Addresses of an expandable segment.
struct Range {
  char* begin;
  std::size_t page;  ///< bytes that are mapped or unmapped together
};

struct Block {
  void* address;
  std::size_t bytes;
  std::size_t asked;  ///< of them, by who has it now: what the statistics count, as torch's splits blocks
  int device;
  Stream* stream;  ///< that it was allocated for
  std::vector<Stream*> used_on;
  Block *before = nullptr, *behind = nullptr;  ///< in its segment, if there are segments
  const Range* range = nullptr;                ///< if its segment is expandable
  bool mapped = true;                          ///< there is memory behind its addresses
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
    if (!caching_enabled() || std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr)
      return uncached(device, bytes);
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
    const std::size_t used = reserved(device) + uncached_[device] + faults().taken_by_others;
    return {total(device) - std::min(total(device), used), total(device)};
  }
  void set_cap(int device, std::size_t bytes) override { caps_[device] = bytes; }
  bool& caching_enabled() override { return caching_enabled_; }
  std::size_t cap(int device) const override { return std::min(caps_[device], total(device)); }
  std::size_t total(int) const override { return faults().memory_bytes; }

 protected:
  virtual bool runs_callbacks() const { return true; }

 private:
  using Stat = c10::CachingAllocator::Stat;
  using Place =
      std::pair<std::size_t, void*>;  ///< of what is free the smallest is taken, at the lowest address

  /// Without the cache memory is the driver's, and in none of the statistics.
  c10::DataPtr uncached(int device, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    void* const address = bytes <= getMemoryInfo(device).first ? reserve(device, bytes) : nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "CUDA error: out of memory");
    uncached_[device] += bytes;
    return {address, new Block{address, bytes, 0, device, nullptr, {}}, &give_back_uncached,
            device_at(device)};
  }
  static void give_back_uncached(void* block);
  /// As cudaFree().
  void free_uncached(Block* block) {
    try {
      synchronise_device(block->device, "cudaFree");
    } catch (const DeviceFault&) {
      return;  // the device has failed: the memory is lost until reset()
    }
    const std::lock_guard lock(mutex_);
    release(block->device, block->address, block->bytes);
    uncached_[block->device] -= block->bytes;
    delete block;
  }

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
    keep(block);
  }

  void keep(Block* block) {
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
    if (block->range != nullptr || (unit != 0 && block->small) ? left < 512 : unit == 0 || left <= unit / 2)
      return;
    keep(cut(block, bytes));
  }

  /// The part of the block beyond `bytes`, which becomes one of its own.
  Block* cut(Block* block, std::size_t bytes) {
    auto* const rest = new Block(*block);
    rest->address = static_cast<char*>(block->address) + bytes;
    rest->bytes = block->bytes - bytes;
    rest->asked = 0;
    rest->idle = false;
    rest->before = block;
    if (rest->behind != nullptr) rest->behind->before = rest;
    block->behind = rest;
    block->bytes = bytes;
    return rest;
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
    if (block == nullptr && !capture_under_way()) {  // torch keeps what it has while anybody captures
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
    auto found = free.lower_bound({bytes, nullptr});
    if (capturing(stream) || found == free.end()) return nullptr;
    // The one that can grow least.
    for (auto next = std::next(found); found->second->range != nullptr && next != free.end() &&
                                       most_bytes(*next->second) < most_bytes(*found->second);
         ++next) {
      found = next;
    }
    Block* const block = found->second;
    if (unit == 0 && block->range == nullptr && block->bytes > 2 * bytes) return nullptr;
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
    if (reserved(device) + whole > cap(device) || whole > getMemoryInfo(device).first) return nullptr;
    // torch's allocator relaxes the capture only where the stream that it allocates for is captured.
    TORCH_CHECK(capturing(stream) || !capture_forbids("cudaMalloc"),
                "CUDA error: operation not permitted when stream is capturing");
    if (expandable() && !capturing(stream)) return expanded(stream, device, bytes);
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

  /// Note [Expandable segments]
  /// With `expandable_segments:True` torch has one segment for each stream and size class, of more addresses
  /// than it needs, and maps memory behind them as it goes. For a block that it does not have it takes the
  /// free one in front of the addresses without memory, and maps only what is missing behind it. So memory
  /// that a callback has freed is used though the driver has more. Memory is given back by the page.
  bool expandable() const {
    return kType == c10::DeviceType::CUDA && runs_callbacks() &&
           c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments();
  }

  static std::size_t most_bytes(const Block& block) {
    return block.bytes + (block.behind != nullptr && !block.behind->mapped ? block.behind->bytes : 0);
  }

  /// A block at the end of what is mapped, after more has been; null if there are no addresses.
  Block* expanded(Stream& stream, int device, std::size_t bytes) {
    const bool small = bytes <= faults().segment_bytes / 2;
    Block* block = expandable_block(stream, device, small, bytes);
    if (block == nullptr) return nullptr;
    if (!block->mapped) block = map(block, std::min(block->bytes, bytes));
    while (block->bytes < bytes)
      block = map(block->behind, std::min(bytes - block->bytes, block->behind->bytes));
    forget(block);
    block->asked = bytes;
    split(block, bytes);
    keep_as_it_is(*block);
    return block;
  }

  /// The first with enough addresses that are free, mapped or not.
  Block* expandable_block(Stream& stream, int device, bool small, std::size_t bytes) {
    for (const auto& [address, unmapped] : unmapped_[{&stream, small}]) {
      Block* const first =
          unmapped->before != nullptr && unmapped->before->idle ? unmapped->before : unmapped;
      std::size_t room = 0;
      for (const Block* each = first; each != nullptr && (each->idle || !each->mapped); each = each->behind)
        room += each->bytes;
      if (room >= bytes) return first;
    }
    const std::size_t unit = faults().segment_bytes, page = unit == 0 ? 512 : small ? unit : 10 * unit;
    const std::size_t whole = (std::max(total(device) / 4, bytes) + page - 1) / page * page;
    void* const address = reserve(device, whole);
    if (address == nullptr) return nullptr;
    auto* const block = new Block{address, whole, 0, device, &stream, {}};
    block->small = small;
    block->range = new Range{static_cast<char*>(address), page};
    block->mapped = false;
    unmapped_[{&stream, small}].emplace(address, block);
    return block;
  }

  /// Maps so many bytes and more, a whole number of pages. They become one with the free block before them.
  Block* map(Block* block, std::size_t bytes) {
    auto& unmapped = unmapped_[{block->stream, block->small}];
    const std::size_t page = block->range->page, whole = (bytes + page - 1) / page * page;
    unmapped.erase(block->address);
    if (whole < block->bytes) {
      Block* const rest = cut(block, whole);
      unmapped.emplace(rest->address, rest);
    }
    block->mapped = true;
    poison(*block->stream, block->address, block->bytes);
    stats_[block->device].reserved_bytes[0].increase(whole);
    ++stats_[block->device].num_device_alloc;
    if (block->before != nullptr && block->before->idle) block = join(block->before, block);
    if (block->behind != nullptr && block->behind->idle) block = join(block, block->behind);
    keep(block);
    return block;
  }

  /// Gives back the pages that lie in a free block as a whole. What is left of it are free blocks.
  void unmap(Block* block) {
    const std::size_t page = block->range->page;
    const auto at = static_cast<std::size_t>(static_cast<char*>(block->address) - block->range->begin);
    const std::size_t first = (at + page - 1) / page * page, last = (at + block->bytes) / page * page;
    if (last <= first) return;
    forget(block);
    if (at + block->bytes > last) keep(cut(block, last - at));
    if (first > at) {
      Block* const rest = cut(block, first - at);
      keep(block);
      block = rest;
    }
    keep_as_it_is(*block);
    stats_[block->device].reserved_bytes[0].decrease(block->bytes);
    ++stats_[block->device].num_device_free;
    block->mapped = false;
    auto& unmapped = unmapped_[{block->stream, block->small}];
    for (Block* const next : {block->behind, block->before}) {
      if (next == nullptr || next->mapped) continue;
      unmapped.erase(next->address);
      block = next == block->behind ? join(block, next) : join(next, block);
    }
    if (block->before != nullptr || block->behind != nullptr) {
      unmapped.emplace(block->address, block);
      return;
    }
    release(block->device, block->address, block->bytes);
    delete block->range;
    delete block;
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
        if (block->device != device || block->range != nullptr) return false;
        if (block->before != nullptr || block->behind != nullptr) return false;
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
    std::vector<Block*> expandable;
    for (const auto& [stream, blocks] : free_) {
      for (const auto& [place, block] : blocks) {
        if (block->device == device && block->range != nullptr) expandable.push_back(block);
      }
    }
    if (!expandable.empty() && !poisoned) synchronise_poison(device);
    for (Block* const block : expandable) unmap(block);
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
  std::map<std::pair<Stream*, bool>, std::map<Place, Block*>> free_;      ///< small ones apart
  std::map<std::pair<Stream*, bool>, std::map<void*, Block*>> unmapped_;  ///< of expandable segments
  std::vector<std::pair<std::vector<PointPtr>, Block*>> pending_;
  c10::CachingDeviceAllocator::DeviceStats stats_[kDevices];
  std::size_t caps_[kDevices]{SIZE_MAX, SIZE_MAX};
  std::size_t uncached_[kDevices]{};
  bool caching_enabled_ = true;
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

void CachingAllocator::give_back_uncached(void* block) {
  caching().free_uncached(static_cast<Block*>(block));
}
void CachingAllocator::give_back(void* context) { caching().free(static_cast<Block*>(context)); }

const bool registered_allocator = [] {
  c10::SetAllocator(kType, &caching(), 100);
  return true;
}();

}  // namespace

Allocator& allocator() { return caching(); }

}  // namespace pretend
