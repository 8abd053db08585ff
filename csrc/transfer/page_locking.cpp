#include "transfer/page_locking.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <unordered_set>
#include <utility>

#include "core/amount.h"
#include "core/host_memory.h"
#include "io/memory_watch.h"
#include "platform/memory.h"
#include "platform/process.h"
#include "transfer/staging.h"

namespace dynswap {

namespace {

constexpr std::size_t kSmall = 64u << 10;   // up to here a master has a page-locked copy
constexpr std::size_t kCopyAlignment = 64;  // more than any cast kernel needs
constexpr std::size_t kUnsaidPart = 16;     // up to 1/16 of the bytes may be staged without a warning

/// Whether one registration, or one allocation, holds all of these bytes. Where there is no driver of CUDA's
/// to be asked, or it does not know, locked memory is taken for whole.
bool in_one_range(const std::byte* first, std::size_t bytes) noexcept {
  constexpr const char* kName = "cuPointerGetAttribute";
  constexpr int kRangeStart = 11, kRangeSize = 12;  // CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, _SIZE
  static const auto ask = [] {
    void* found = loaded_function(kName);
    for (const char* library : {"libcuda.so.1", "nvcuda.dll"}) {
      if (found == nullptr) found = loaded_function(kName, library);
    }
    return reinterpret_cast<int (*)(void* value, int attribute, std::uintptr_t address)>(found);
  }();
  if (ask == nullptr) return true;
  const auto at = reinterpret_cast<std::uintptr_t>(first);
  std::uintptr_t start = 0;
  std::size_t size = 0;
  if (ask(&start, kRangeStart, at) != 0 || ask(&size, kRangeSize, at) != 0) return true;
  // (A driver that knows the memory by another address does not tell by this one.)
  return at < start || at >= start + size || at + bytes <= start + size;
}

/// What others have page-locked of a source: nothing that counts; all of it, as `pin_memory()` does; or
/// pieces of it, as a loader may lock a large mapping. A copy may not span two pieces.
enum class ByOthers { no, whole, pieces };

ByOthers locked_by_others(PageLocker& locker, const Source& source) {
  const std::byte* const last = source.address + source.extent() - 1;
  if (!locker.is_locked(source.address) || !locker.is_locked(last)) return ByOthers::no;
  return in_one_range(source.address, source.extent()) ? ByOthers::whole : ByOthers::pieces;
}

/// Whether others have page-locked some of a block, which keeps it from being locked as a whole. Looks at
/// about a thousand places: a shorter piece can be missed.
bool locked_in_part(PageLocker& locker, const std::byte* block, std::size_t bytes) {
  const std::size_t step = std::max(page_size(), bytes / 1000);
  for (std::size_t at = 0; at < bytes; at += step) {
    if (locker.is_locked(block + at)) return true;
  }
  return locker.is_locked(block + bytes - 1);
}

/// Note [Does the driver tell bytes from pages]: it locks pages, but what it takes for locked may be just the
/// bytes that it was asked to lock. No manual says, so it is tried, on memory of ours: of a page that is
/// locked for some bytes, are the other bytes known not to be, and can they be locked separately? Then any
/// block can be locked, whatever else lies on its pages. Else only one with pages of its own.
bool tells_bytes_from_pages(PageLocker& locker) {
  const std::size_t page = page_size();
  void* const memory = map_memory(2 * page);
  if (memory == nullptr) return false;
  const auto give_back = [page](void* pages) { unmap_memory(pages, 2 * page); };
  const std::unique_ptr<void, decltype(give_back)> owner(memory, give_back);
  auto* const left = static_cast<std::byte*>(memory) + page / 4;
  auto* const right = left + page;  // they meet in the middle of the second page
  std::string unsaid;
  const std::shared_ptr<void> left_lock = locker.lock(left, page, unsaid);
  if (!left_lock || locker.is_locked(left - 1) || !locker.is_locked(left) || locker.is_locked(right))
    return false;
  std::shared_ptr<void> right_lock = locker.lock(right, page / 2, unsaid);
  if (!right_lock || locker.is_locked(right + page / 2)) return false;
  right_lock.reset();
  return !locker.is_locked(right) && locker.is_locked(right - 1);
}

/// Works out one page_lock().
class Pinning {
  /// The memory's charge to the account, and what keeps it locked. The latter is released first.
  using Charge = std::shared_ptr<const HostMemory::Charge>;
  using Locked = std::pair<Charge, std::shared_ptr<void>>;

 public:
  Pinning(PageLocker& locker, PinnedCopies& copies) : locker_(locker), copies_(copies) {}

  /// Locks an item's master in place, if it may be locked there or is locked already.
  void in_place(Lockable& item) {
    const Source& source = *item.source;
    const bool small = source.extent() <= kSmall;
    ByOthers others = ByOthers::no;
    over_limit_ = false;
    const auto locker = [&]() -> std::shared_ptr<void> {
      others = locked_by_others(locker_, source);
      // A small one alone is not worth a registration; in a block that is locked for others it is there
      // already.
      if (others != ByOthers::no || small || !may_be_locked(item)) return nullptr;
      std::string refusal;
      std::shared_ptr<void> lock = register_block(item, refusal);
      if (lock) {
        registered_.push_back(item.held.get());
      } else if (!over_limit_ && locked_in_part(locker_, item.block, item.block_bytes)) {
        others = ByOthers::pieces;
      } else if (!over_limit_) {
        reason_ = std::move(refusal);
      }
      return lock;
    };
    if (item.held) {
      item.locked = item.held->lock(locker);
    } else {
      others = locked_by_others(locker_, source);
    }
    if (item.locked || others == ByOthers::whole) {
      replace(item).pinned = true;
    } else if (!small && !give_copy(item) && !over_limit_) {
      (others == ByOthers::pieces ? bytes_in_pieces_
       : may_be_locked(item)      ? refused_bytes_
                                  : shared_bytes_) += source.stored_bytes();
    }
  }

  /// Gives small masters their copies: Note [A small master has a page-locked copy].
  void beside(const std::vector<Lockable*>& small) {
    std::size_t bytes = 0;
    for (const Lockable* item : small) bytes += room(*item);
    if (bytes == 0) return;
    const Charge charge = HostMemory::charge(HostUse::copies, locker_.taken(bytes));
    if (!charge) return;
    const std::shared_ptr<std::byte> memory = locker_.allocate(bytes, reason_);
    if (!memory) {
      refused_bytes_ += bytes;
      return;
    }
    const auto counted = std::make_shared<Locked>(charge, memory);
    const std::shared_ptr<std::byte> block(counted, memory.get());
    std::byte* at = block.get();
    for (Lockable* item : small) {
      auto copy = std::make_shared<PinnedCopy>();
      copy->bytes = {block, at};
      at += room(*item);
      Source& source = replace(*item);
      source.pinned = true;
      source.pinned_copy = std::move(copy);
    }
  }

  /// What is not page-locked goes through a ring of buffers that are. Where the system refuses, because it
  /// grants less in all (WSL), the masters that were locked last give way to them: without a ring the model
  /// could not run. Only those that were locked just now do: others stay locked for whoever locked them
  /// before.
  void leave_room_for_ring(std::vector<Lockable>& items) {
    if (refused_bytes_ == 0 || !locker_.locks_nothing().empty()) return;
    std::string unsaid;
    for (auto last = registered_.rbegin(); last != registered_.rend(); ++last) {
      if (locker_.allocate(kStagingBytes * kStagingBuffers, unsaid)) return;
      for (Lockable& item : items) {
        if (item.locked && item.held.get() == *last) unlock(item);
      }
    }
  }

  std::string what_is_slower(const std::vector<Lockable>& items, std::size_t all_bytes) const {
    std::ostringstream text;
    const std::string why = locker_.locks_nothing();
    if (!why.empty()) {
      const std::size_t staged = refused_bytes_ + shared_bytes_ + bytes_in_pieces_;
      if (staged > all_bytes / kUnsaidPart) {
        text << amount(staged)
             << " of weights go to the device through a small pinned buffer, which is slower: " << why
             << ", and " << reason_
             << ". Pin the masters yourself (Tensor.pin_memory), or pass host_budget='minimum' to install(), "
                "which "
                "page-locks nothing, to accept this without this warning";
      }
      return text.str();
    }
    if (refused_bytes_ > 0) {
      std::size_t granted = 0;  // as the account counts it
      std::unordered_set<const HeldBytes*> counted;
      for (const Lockable& item : items) {
        if (item.locked && counted.insert(item.held.get()).second) granted += item.block_bytes;
        if (item.source->pinned_copy) granted += room(item);
      }
      text << "the system refused to page-lock " << amount(refused_bytes_) << " of weights (" << reason_
           << ")";
      if (granted > 0) text << ", after it had locked " << amount(granted);
      text << ": they go to the device through a small pinned buffer, which is slower. If memory is short, "
              "free some (WSL grants a few GiB at most, however much is free), or pass host_budget='minimum' "
              "to install(), which page-locks nothing, to accept that without this warning";
    }
    if (bytes_in_pieces_ > 0) {
      if (refused_bytes_ > 0) text << ". Also, ";
      text << amount(bytes_in_pieces_)
           << " of weights lie in memory that other code has page-locked in part, and no copy may cross the "
              "edge "
              "of a locked range: they go to the device through a small pinned buffer, which is slower. "
              "Register "
              "the memory of each tensor in one call, or leave that to install(), or pass "
              "host_budget='minimum' "
              "to it, which page-locks nothing, to accept that without this warning";
    }
    if (shared_bytes_ > all_bytes / kUnsaidPart) {
      if (refused_bytes_ + bytes_in_pieces_ > 0) text << ". Also, ";
      text
          << amount(shared_bytes_)
          << " of weights lie on memory pages that are not known to be theirs alone, so they are not "
             "page-locked, and go to the device through a small pinned buffer, which is slower. Start Python "
             "with MALLOC_MMAP_THRESHOLD_=65536 in the environment to give tensors pages of their own, pin "
             "the "
             "masters yourself (Tensor.pin_memory), or pass host_budget='minimum' to install(), which "
             "page-locks nothing, to accept that without this warning";
    }
    return text.str();
  }

 private:
  static std::size_t room(const Lockable& item) {
    return (item.source->extent() + kCopyAlignment - 1) / kCopyAlignment * kCopyAlignment;
  }

  static Source& replace(Lockable& item) {
    auto source = std::make_shared<Source>(*item.source);
    Source& changed = *source;
    item.source = std::move(source);
    return changed;
  }

  void unlock(Lockable& item) {
    item.held->unlock();
    item.locked = false;
    replace(item).pinned = false;
    refused_bytes_ += item.source->stored_bytes();
  }

  bool may_be_locked(const Lockable& item) {
    if (!locker_.locks_nothing().empty()) return false;
    if (!item.held || item.own_pages) return item.held != nullptr;
    if (!tells_bytes_) tells_bytes_ = tells_bytes_from_pages(locker_);
    return *tells_bytes_;
  }

  std::shared_ptr<void> register_block(const Lockable& item, std::string& refusal) {
    Charge charge = HostMemory::charge(HostUse::locked, item.block_bytes);
    over_limit_ = !charge;
    if (over_limit_) return nullptr;
    std::shared_ptr<void> lock = locker_.lock(const_cast<std::byte*>(item.block), item.block_bytes, refusal);
    if (!lock) return nullptr;
    return std::make_shared<Locked>(std::move(charge), std::move(lock));
  }

  /// Null, and why in `reason_`, if there is none.
  std::shared_ptr<PinnedCopy> copy_with_watch(const Source& source) {
    const auto watch = std::make_shared<MemoryWatch>(source);
    if (!watch->exact()) {
      reason_ = "the system does not tell of all writes to them, which a page-locked copy takes";
      return nullptr;
    }
    auto copy = std::make_shared<PinnedCopy>();
    copy->bytes = locker_.allocate(source.extent(), reason_);
    copy->writes = [watch]() -> std::optional<std::uint64_t> {
      const std::uint64_t writes = watch->writes();
      return watch->exact() ? std::optional(writes) : std::nullopt;  // the watch may be lost
    };
    return copy->bytes ? copy : nullptr;
  }

  /// Gives a large master a page-locked copy, where nothing can be locked in place and every write to the
  /// master is seen. Returns false if it has none.
  bool give_copy(Lockable& item) {
    const SourcePtr source = item.source;
    if (locker_.locks_nothing().empty() || source->coded_first > 0) return false;
    if (source->mapped) {
      reason_ = "they are mapped from files";
      return false;
    }
    bool has_room = false;
    const auto copy = copies_.copy_of(source->address, source->extent(), [&] {
      has_room = true;
      return copy_with_watch(*source);
    });
    if (!copy && !has_room) {
      over_limit_ = HostMemory::named();
      reason_ =
          "page-locked copies of them would take more than half of the free RAM (host_budget='24GiB', say, "
          "allows what is within that)";
    }
    if (!copy) return false;
    Source& changed = replace(item);
    changed.pinned = true;
    changed.pinned_copy = copy;
    return true;
  }

  PageLocker& locker_;
  PinnedCopies& copies_;
  std::optional<bool> tells_bytes_;
  std::size_t refused_bytes_ = 0;
  bool over_limit_ = false;  ///< whether the account had no room for the item at hand
  std::size_t shared_bytes_ = 0;
  std::size_t bytes_in_pieces_ = 0;
  std::vector<const HeldBytes*> registered_;  ///< in this order
  std::string reason_;
};

}  // namespace

std::string page_lock(PageLocker& locker, PinnedCopies& copies, std::vector<Lockable>& items) {
  Pinning pinning(locker, copies);
  std::vector<Lockable*> large, small;
  std::size_t bytes = 0;
  for (Lockable& item : items) {
    const Source& source = *item.source;
    if (source.pinned || source.from_files() || source.address == nullptr || source.count == 0) continue;
    (source.extent() <= kSmall ? small : large).push_back(&item);
    bytes += source.stored_bytes();
  }
  for (Lockable* item : large) pinning.in_place(*item);
  for (Lockable* item : small) pinning.in_place(*item);  // in the blocks of large ones
  std::erase_if(small, [](const Lockable* item) { return item->source->pinned; });
  pinning.beside(small);
  pinning.leave_room_for_ring(items);
  return pinning.what_is_slower(items, bytes);
}

}  // namespace dynswap
