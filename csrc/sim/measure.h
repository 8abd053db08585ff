// Measures what residents save, by running the real engine on the virtual clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sim/access_pattern.h"

namespace dynswap::sim {

/// Rounds of which a measurement without experts is made: some go by before the others are timed.
constexpr int kWarmUpRounds = 3;
constexpr int kMeasuredRounds = 2;

/// The seconds of a round of the real engine over the virtual clock, with these residents, a cache of
/// `cache_bytes` for groups by use, if there are any, and the rest of the budget for the arena. In each
/// round, each use of a group by use is drawn from those next to it (its layer's): a router chooses others
/// each time. Infinite if the budget cannot hold them.
double measure(const AccessPattern& pattern, const std::vector<bool>& resident, std::size_t cache_bytes,
               std::size_t budget, std::uint32_t prefetch);

}  // namespace dynswap::sim
