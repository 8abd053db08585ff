#include "io/read_policy.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace dynswap {

void ReadPolicy::waited(Clock::duration time) {
  const std::lock_guard lock(mutex_);
  waited_ += time;
}

void ReadPolicy::reading(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  const Clock::duration elapsed = now - begin_;
  if (elapsed < kWindow) return;
  begin_ = now;
  const Clock::duration waited = std::exchange(waited_, {});
  if (elapsed < kIdle) judge(waited > elapsed * kTolerated);
}

void ReadPolicy::judge(bool late) noexcept {
  const bool hurried = mode() == ReadMode::quick;
  if (late) {
    calm_ = 0;
    if (!hurried) patience_ = std::min(2 * patience_, kLongestPatience);
    mode_.store(ReadMode::quick, std::memory_order_relaxed);
  } else if (++calm_ >= patience_ && hurried) {
    calm_ = 0;
    mode_.store(ReadMode::cheap, std::memory_order_relaxed);
  } else if (!hurried && calm_ >= 8 * patience_) {
    calm_ = 0;
    patience_ = std::max(patience_ / 2, kFirstPatience);
  }
}

}  // namespace dynswap
