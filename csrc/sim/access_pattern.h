// The order in which a model uses its groups of weights, and what it computes with each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/residency.h"

namespace dynswap::sim {

/// One use of a group: what is computed after it has come.
struct Step {
  std::uint32_t group = 0;
  double compute_seconds = 0;
  /// The groups in use are let go before the next step: false within a module that uses several at once.
  bool lets_go = true;
};

/// Passes of a model, as they were measured or are foreseen. They repeat for ever.
struct AccessPattern {
  Groups groups;                   ///< as on the device; which of them are tiny is found from the steps
  std::vector<double> copy_bytes;  ///< what a copy of each moves, at `bytes_per_second`; empty: its bytes
  std::vector<Step> steps;         ///< in the order of use
  double bytes_per_second = 0;
  double latency = 0;  ///< seconds of each copy besides its bytes
};

}  // namespace dynswap::sim
