// Page-locking masters for an accelerator: in place, as a copy, or not at all.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/lockable.h"
#include "transfer/pinned_copies.h"

namespace dynswap {

/// Page-locks memory for one device. Used by one thread. What it returns may be freed by any thread.
class PageLocker {
 public:
  virtual ~PageLocker() = default;

  /// Whether the device may read this byte by itself. It does not matter who has locked it.
  virtual bool is_locked(const std::byte* byte) = 0;

  /// Why this locker locks nothing in place; empty if it does.
  virtual std::string locks_nothing() const { return {}; }

  /// Locks a block in place, for as long as the result lives, in one call however large: a copy may not span
  /// two registrations, and torch copies tensors whole. Null, and why in `reason`, if that is refused.
  virtual std::shared_ptr<void> lock(std::byte* block, std::size_t bytes, std::string& reason) = 0;

  /// Locked memory of its own. Null, and why in `reason`, if there is none.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string& reason) = 0;

  /// How much RAM allocate() takes for so many bytes.
  virtual std::size_t taken(std::size_t bytes) const { return bytes; }
};

/// Page-locks masters in plain RAM, as far as that is safe and the system allows it, and replaces their
/// sources by pinned ones. A master is locked in place where its block may be locked, or is locked already. A
/// small one gets a page-locked copy instead, and so does a large one where nothing can be locked in place
/// (Note [A large master has a page-locked copy]). Other masters stay as they are: returns a sentence for the
/// user about them, empty if there is nothing to say. It does not mention masters that HostMemory has no room
/// to lock in place, as the user asked for that. Takes seconds for gigabytes.
std::string page_lock(PageLocker& locker, PinnedCopies& copies, std::vector<Lockable>& items);

}  // namespace dynswap
