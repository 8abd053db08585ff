// Page-locking masters for an accelerator: in place, beside them, or not at all.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/lockable.h"

namespace dynswap {

/// What page-locks memory for one device. Used by one thread; what it returns may be let go of by any.
class PageLocker {
 public:
  virtual ~PageLocker() = default;

  /// Whether the device may read this byte by itself, whoever has locked it.
  virtual bool is_locked(const std::byte* byte) = 0;

  /// Locks a block in place, for as long as the result lives. Null, and why in `reason`, if that is refused.
  virtual std::shared_ptr<void> lock(std::byte* block, std::size_t bytes, std::string& reason) = 0;

  /// Locked memory of its own. Null, and why in `reason`, if there is none.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string& reason) = 0;
};

/// Page-locks what lies in plain RAM as far as it may be and the system allows, and replaces those sources by
/// ones that say so: the master in place where its block may be locked, or is already, and a copy beside it
/// where it is small. The others stay as they are. Returns a sentence for the user about those, empty if
/// there is nothing to say. Takes seconds for gigabytes.
std::string page_lock(PageLocker& locker, std::vector<Lockable>& items);

}  // namespace dynswap
