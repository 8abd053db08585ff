// The page-locked copies of large masters that one install has.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "core/source.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// Remembers the copies of large masters over all plans of one session: the next plan goes on using them.
/// Thread-safe. A forked child has none, and page-locks nothing.
class PinnedCopies {
 public:
  /// Returns the copy of the master at this place, or else the one that `make` makes, which may be null. The
  /// copy is counted while it lives (HostUse::copies), as the power of two that torch's allocator takes for
  /// it. Null, without a call of `make`, if there is no room.
  std::shared_ptr<PinnedCopy> copy_of(const std::byte* address, std::size_t bytes,
                                      const std::function<std::shared_ptr<PinnedCopy>()>& make);

 private:
  struct Copies {
    Mutex mutex;
    // LOCK: mutex
    std::map<std::pair<const std::byte*, std::size_t>, std::weak_ptr<PinnedCopy>> known;
  };

  PerProcess<Copies> copies_;
};

}  // namespace dynswap
