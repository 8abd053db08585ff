// What a recording of a model's passes says about them.
#pragma once

#include <cstddef>
#include <vector>

#include "core/engine.h"
#include "core/recorder.h"
#include "sim/access_pattern.h"

namespace dynswap::sim {

struct Observed {
  AccessPattern pattern;       ///< of the passes that were recorded from beginning to end
  std::size_t passes = 0;      ///< how many those are; 0: there is nothing to go by
  double compute_seconds = 0;  ///< of all passes together, divided by their number: all but the waits
  double wait_seconds = 0;     ///< of one pass
};

/// The time from a use to whatever comes next is the compute of that use; what lies between two passes
/// counts as the last one's, since copies can go on in it. The bus's speed is that of the copies while
/// any was under way: 0 if there was none.
///
/// Threads that call the model at the same time are one consumer, whose uses are all of theirs in the order
/// in which they were made: they share the bus and what is on the device. It computes unless all of them
/// wait. A thread that only fetches for others (autograd's) stands for the caller that waits for it.
///
/// Tensors that were saved for backward, and come back beside the weights, have no step of their own: no plan
/// keeps them.
Observed observe(const Timeline& timeline, const std::vector<Engine::GroupReport>& groups);

}  // namespace dynswap::sim
