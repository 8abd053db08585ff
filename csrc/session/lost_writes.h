// Writes that were lost, until the user can be told.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "platform/fork_safe.h"
#include "tensor/master_record.h"

namespace dynswap {

/// Masters to which a write on a handed-out tensor can not be taken. Thread-safe: a tensor may die anywhere.
class LostWrites {
 public:
  void note(const std::shared_ptr<MasterRecord>& of) {
    const std::lock_guard lock(mutex_);
    masters_.push_back(of);
  }
  /// Those that have come since this was last asked.
  std::vector<std::shared_ptr<MasterRecord>> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(masters_, {});
  }

 private:
  Mutex mutex_;
  std::vector<std::shared_ptr<MasterRecord>> masters_;  ///< LOCK: mutex_
};

}  // namespace dynswap
