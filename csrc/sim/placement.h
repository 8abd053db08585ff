// Chooses the groups that stay on the device, by the time that they save.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sim/access_pattern.h"

namespace dynswap::sim {

struct Placement {
  std::vector<bool> resident;   ///< each group
  double seconds = 0;           ///< of a round, by measure() (sim/measure.h)
  std::size_t cache_bytes = 0;  ///< for groups by use
};

/// Note [Residents by time]
/// What a resident saves is not its bytes but the wait that they cause: a copy that hides behind compute
/// saves nothing, one where the bus cannot keep up saves all of it, and every resident takes room from the
/// arena, which is what lets copies run ahead through a stretch of little compute. So placements are measured
/// with the real engine on the virtual clock: the even one at several sizes of the arena, and those that
/// begin with the groups that are used most and keep what is streamed in step with the compute. From the best
/// of them, simulated annealing goes on (one group in, one out, or both). Never worse than plan_residency(),
/// which is among them.
///
/// Note [Room for experts by time]
/// Weights in an order are needed in each pass, an expert only if it is chosen. So a byte for such weights
/// saves more. But if their copies hide behind compute it saves nothing, while an expert is always waited
/// for. So several sizes of the experts' cache are measured on the virtual clock, with experts chosen at
/// random; the size that the engine takes by itself is among them. With the best size, the residents among
/// the other weights are chosen by time.
///
/// What the pattern says is kept is resident in any case. Throws BudgetError if the budget does not hold
/// that, or the largest group. Deterministic.
Placement place_by_time(const AccessPattern& pattern, std::size_t budget, std::uint32_t prefetch);

}  // namespace dynswap::sim
