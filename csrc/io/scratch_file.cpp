#include "io/scratch_file.h"

#include <iterator>
#include <mutex>
#include <utility>

#include "core/align.h"
#include "io/aligned_buffer.h"

namespace dynswap {

std::shared_ptr<const ScratchFile::Range> ScratchFile::take(std::size_t bytes) {
  auto range = std::make_unique<Range>(Range{0, align_up(bytes, kDirectAlign)});
  {
    const std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto each = free_.begin(); each != free_.end(); ++each) {
      if (each->second >= range->bytes && (best == free_.end() || each->second < best->second)) best = each;
    }
    range->offset = best == free_.end() ? end_ : best->first;
    if (best == free_.end()) {
      auto charge = keep_ == Keep::yes ? HostMemory::charge(HostUse::page_cache, range->bytes) : nullptr;
      if (keep_ == Keep::yes && !charge) return nullptr;
      file_->reserve(end_, range->bytes);
      if (charge) charges_.push_back(std::move(charge));
      end_ += range->bytes;
    } else {
      const std::size_t left = best->second - range->bytes;
      free_.erase(best);
      if (left > 0) free_.emplace(range->offset + range->bytes, left);
    }
  }
  return {range.release(), [self = shared_from_this()](const Range* over) {
            const std::unique_ptr<const Range> owned(over);
            self->give_back(*owned);
          }};
}

/// Ranges that meet become one.
void ScratchFile::give_back(const Range& range) {
  if (forks() != process_) return;  // a child takes nothing, and may find the list half changed
  const std::lock_guard lock(mutex_);
  auto entry = free_.emplace(range.offset, range.bytes).first;
  if (const auto next = std::next(entry);
      next != free_.end() && next->first == entry->first + entry->second) {
    entry->second += next->second;
    free_.erase(next);
  }
  if (entry == free_.begin()) return;
  const auto before = std::prev(entry);
  if (before->first + before->second != entry->first) return;
  before->second += entry->second;
  free_.erase(entry);
}

}  // namespace dynswap
