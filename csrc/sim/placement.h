// Which groups to keep on the device, by what it saves in time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sim/access_pattern.h"

namespace dynswap::sim {

struct Placement {
  std::vector<bool> resident;   ///< each group
  double seconds = 0;           ///< of a round, by measure() (sim/measure.h)
  std::size_t cache_bytes = 0;  ///< for groups by use (sim/room_for_experts.h)
};

/// The pattern without the groups that are `left_out`; the others are numbered in their order. The compute of
/// what is left out counts for the use before.
AccessPattern without(const AccessPattern& pattern, const std::vector<bool>& left_out);

/// Note [Residents by time]
/// What a resident saves is not its bytes but the wait that they cause: a copy that hides behind compute
/// saves nothing, one where the bus cannot keep up saves all of it, and every resident takes room from the
/// arena, which is what lets copies run ahead through a stretch of little compute. So placements are measured
/// with the real engine on the virtual clock: the even one at several sizes of the arena, and those that
/// begin with the groups that are used most and keep what is streamed in step with the compute. From the best
/// of them, simulated annealing goes on (one group in, one out, or both). Never worse than plan_residency(),
/// which is among them.
///
/// Throws BudgetError if the largest group does not fit. Deterministic.
Placement place_by_time(const AccessPattern& pattern, std::size_t budget, std::uint32_t prefetch);

/// The same, with the groups of `keep` resident in any case. Throws BudgetError if the budget does not hold
/// them.
Placement place_by_time(const AccessPattern& pattern, const std::vector<bool>& keep, std::size_t budget,
                        std::uint32_t prefetch);

}  // namespace dynswap::sim
