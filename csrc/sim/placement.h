// Which groups to keep on the device, by what it saves in time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/engine.h"
#include "sim/access_pattern.h"

namespace dynswap::sim {

/// The seconds of a round of the real engine over the virtual clock, with these residents and the rest of
/// the budget for the arena. Infinite if the budget cannot hold them.
double measure(const AccessPattern& pattern, const std::vector<bool>& resident, std::size_t budget,
               std::uint32_t prefetch);

struct Placement {
  std::vector<bool> resident;  ///< each group
  double seconds = 0;          ///< of a round, by measure()
};

/// Note [Residents by time]
/// What a resident saves is not its bytes but the wait that they cause: a copy that hides behind compute
/// saves nothing, one where the bus cannot keep up saves all of it, and every resident takes room from the
/// arena, which is what lets copies run ahead through a stretch of little compute. So placements are measured
/// with the real engine on the virtual clock: the even one at several sizes of the arena, those that keep
/// what is streamed in step with the compute, and from the best of them on a local search by simulated
/// annealing (one group in, one out, or both). Never worse than plan_residency(), which is among them.
///
/// Throws BudgetError if the largest group does not fit. Deterministic.
Placement place_by_time(const AccessPattern& pattern, std::size_t budget, std::uint32_t prefetch);

}  // namespace dynswap::sim
