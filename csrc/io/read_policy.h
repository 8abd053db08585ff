// Whether what is read has to come quickly, or cheaply.
#pragma once

#include <atomic>
#include <chrono>

#include "platform/fork_safe.h"

namespace dynswap {

/// How a range that the page cache has is brought: copied from there, or read from the disk all the same.
enum class ReadMode : bool { cheap, quick };

/// Note [Quick or cheap]: copying from the page cache is the quickest way, and takes the time of a core that
/// also computes: measured on two cores, a compute-bound model was 6 to 8 % slower for it. The disk puts
/// bytes where they belong by itself. So while consumers wait for weights, the page cache is used; when they
/// have not waited for some time, reads are cheap, until they wait again. Each time that happens it takes
/// longer until the next try, so that a model between the two states does not swing.
///
/// Thread-safe. Times are given, for the tests' sake.
class ReadPolicy {
 public:
  using Clock = std::chrono::steady_clock;

  ReadMode mode() const noexcept { return mode_.load(std::memory_order_relaxed); }

  /// Notes that a consumer has waited so long for weights.
  void waited(Clock::duration time);

  /// Notes that something is about to be read, and judges the mode if a window is over.
  void reading(Clock::time_point now);

 private:
  /// What is judged at a time: shorter ones have too few groups in them.
  static constexpr std::chrono::milliseconds kWindow{100};
  /// Past this, the consumer was doing something else.
  static constexpr std::chrono::seconds kIdle{1};
  /// The share of its time that a consumer may wait.
  static constexpr double kTolerated = 0.03;
  static constexpr int kFirstPatience = 4;
  static constexpr int kLongestPatience = 1 << 12;

  void judge(bool late) noexcept;

  std::atomic<ReadMode> mode_{ReadMode::quick};
  Mutex mutex_;
  // LOCK: mutex_ guards all below.
  Clock::time_point begin_{};      ///< of the window
  Clock::duration waited_{};       ///< in the window
  int calm_ = 0;                   ///< windows in a row without much waiting
  int patience_ = kFirstPatience;  ///< so many of those end the hurry
};

}  // namespace dynswap
