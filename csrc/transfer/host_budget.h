// How much of the host's memory one install may have page-locked.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "core/source.h"

namespace dynswap {

/// Page-locked memory is memory that the system can give to nobody else. Counts what one session has, over
/// all of its plans, and remembers its copies of large masters, which the next plan goes on using.
/// Thread-safe.
class HostBudget {
 public:
  /// Bytes: of all that is page-locked, and, among them, of copies of large masters.
  HostBudget(std::size_t locked, std::size_t copied)
      : named_(locked == copied), locked_(locked), copied_(copied) {}

  /// Counts bytes as page-locked while the result lives. Null, and nothing is counted, if that is too much.
  static std::shared_ptr<void> charge(const std::shared_ptr<HostBudget>& budget, std::size_t bytes);

  /// The copy of the master at this place, or else what `make` makes, which may be null. It is counted while
  /// it lives: with what torch's allocator takes for it, a power of two. Null, and `make` is not called, if
  /// that is too much.
  static std::shared_ptr<PinnedCopy> copy_of(const std::shared_ptr<HostBudget>& budget,
                                             const std::byte* address, std::size_t bytes,
                                             const std::function<std::shared_ptr<PinnedCopy>()>& make);

  /// Whether the user has named the amount, and so knows that what is over it is staged.
  bool named() const noexcept { return named_; }

 private:
  const bool named_;  ///< without a name there is less room for copies than for all
  std::mutex mutex_;
  // LOCK: mutex_ guards all below.
  std::size_t locked_, copied_;  ///< left
  std::map<std::pair<const std::byte*, std::size_t>, std::weak_ptr<PinnedCopy>> copies_;
};

}  // namespace dynswap
