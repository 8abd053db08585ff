#include "io/scratch_file.h"

#include <mutex>

#include "core/align.h"
#include "io/aligned_buffer.h"

namespace dynswap {

std::shared_ptr<const ScratchFile::Range> ScratchFile::take(std::size_t bytes) {
  auto range = std::make_unique<Range>(Range{0, align_up(bytes, kDirectAlign)});
  {
    const std::lock_guard lock(mutex_);
    // One that is a little larger will do: what is saved differs in size from step to step.
    const auto found = free_.lower_bound(range->bytes);
    if (found != free_.end() && found->first <= range->bytes + range->bytes / 4) {
      *range = {found->second, found->first};
      free_.erase(found);
    } else {
      range->offset = end_;
      end_ += range->bytes;
    }
  }
  return {range.release(), [self = shared_from_this()](const Range* over) {
            const std::unique_ptr<const Range> owned(over);
            const std::lock_guard lock(self->mutex_);
            self->free_.emplace(over->bytes, over->offset);
          }};
}

}  // namespace dynswap
