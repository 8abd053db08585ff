// How much host memory one install may have page-locked.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "core/source.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// Counts the page-locked memory of one session, over all of its plans: the system cannot use that memory for
/// anything else. Remembers the copies of large masters, which the next plan goes on using. Thread-safe.
class PinnedBudget {
 public:
  /// `locked`: the most bytes that may be page-locked. `copied`: how many of them may be copies of large
  /// masters; all, if the user has named an amount.
  PinnedBudget(std::size_t locked, std::size_t copied) : named_(locked == copied) {
    counts_->locked = locked;
    counts_->copied = copied;
  }

  /// Counts bytes as page-locked while the result lives. Null, and nothing is counted, if there is no room.
  static std::shared_ptr<void> charge(const std::shared_ptr<PinnedBudget>& budget, std::size_t bytes);

  /// Returns the copy of the master at this place, or else the one that `make` makes, which may be null. The
  /// copy is counted while it lives, as the power of two that torch's allocator takes for it. Null, without a
  /// call of `make`, if there is no room.
  static std::shared_ptr<PinnedCopy> copy_of(const std::shared_ptr<PinnedBudget>& budget,
                                             const std::byte* address, std::size_t bytes,
                                             const std::function<std::shared_ptr<PinnedCopy>()>& make);

  /// Whether the user has named the amount, and so knows that what is over it is staged.
  bool named() const noexcept { return named_; }

 private:
  struct Counts {
    Mutex mutex;
    // LOCK: mutex guards all below. No room in a forked child, which page-locks nothing.
    std::size_t locked = 0, copied = 0;  ///< bytes that are left
    std::map<std::pair<const std::byte*, std::size_t>, std::weak_ptr<PinnedCopy>> copies;
  };

  const bool named_;
  PerProcess<Counts> counts_;
};

}  // namespace dynswap
