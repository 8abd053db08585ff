// A model of the ring that is quick enough to try thousands of placements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynswap::sim {

/// One use of a group: what is computed after it has come.
struct Step {
  std::uint32_t group = 0;
  double compute_seconds = 0;
  /// The groups in use are let go before the next step: false within a module that uses several at once.
  bool lets_go = true;
};

/// Passes of a model, as they were measured or are foreseen. They repeat for ever.
struct Rhythm {
  std::vector<std::size_t> bytes;  ///< each group, on the device
  std::vector<double> copy_bytes;  ///< what a copy of each group moves, at `bytes_per_second`; empty: `bytes`
  std::vector<Step> steps;         ///< in the order of use
  double bytes_per_second = 0;
  double latency = 0;  ///< seconds of each copy besides its bytes
};

/// Streamed groups pass through a ring in the order of use; a copy begins when the bus is free and what it
/// overwrites has been used. What it leaves out is the arena's fragmentation, and that a prediction can fail.
class RingModel {
 public:
  explicit RingModel(const Rhythm& rhythm);

  /// Seconds of all steps once, in the steady state; infinite if the arena cannot hold what is used at one
  /// time.
  double seconds(const std::vector<bool>& resident, std::size_t arena_bytes) const;

  /// How many seconds of waiting each group's copy is part of: those from it on until the bus is idle again,
  /// since all that travels before a wait, with no pause between, is to blame for it alike.
  std::vector<double> blame(const std::vector<bool>& resident, std::size_t arena_bytes) const;

 private:
  /// One use of a streamed group, in the steady state.
  struct Item {
    std::uint32_t step = 0;
    double arrives = 0;
    double stalled = 0;
    bool bus_was_idle = false;
  };
  double run(const std::vector<bool>& resident, std::size_t arena_bytes, std::vector<Item>& items) const;

  const Rhythm& rhythm_;
  std::vector<double> copy_seconds_;  ///< each group
};

}  // namespace dynswap::sim
