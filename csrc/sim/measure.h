// What residents save, by the real engine over the virtual clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sim/access_pattern.h"

namespace dynswap::sim {

/// Rounds of which a measurement without experts is made: some go by before the others are timed.
constexpr int kWarmUpRounds = 3;
constexpr int kMeasuredRounds = 2;

/// The seconds of a round of the real engine over the virtual clock, with these residents and the rest of
/// the budget for the arena. Infinite if the budget cannot hold them.
double measure(const AccessPattern& pattern, const std::vector<bool>& resident, std::size_t budget,
               std::uint32_t prefetch);

/// The seconds of a round where some groups are `by_use`, with this cache for them. In each round, each use
/// of one is drawn from the groups by use next to it (its layer's): a router chooses others each time.
double measure(const AccessPattern& pattern, const std::vector<bool>& resident,
               const std::vector<bool>& by_use, std::size_t cache_bytes, std::size_t budget,
               std::uint32_t prefetch);

}  // namespace dynswap::sim
