// How a budget is divided between experts and the other weights, by what it saves in time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sim/access_pattern.h"
#include "sim/placement.h"

namespace dynswap::sim {

/// place_by_time() where some groups are `by_use`.
///
/// Note [Room for experts by time]
/// Weights in an order are needed in each pass, an expert only if it is chosen. So a byte for such weights
/// saves more. But if their copies hide behind compute it saves nothing, while an expert is always waited
/// for. So several sizes of the experts' cache are measured on the virtual clock, with experts chosen at
/// random; the size that the engine takes by itself is among them. With the best size, the residents among
/// the other weights are chosen by time. Throws BudgetError if nothing fits. Deterministic.
Placement place_by_time(const AccessPattern& pattern, const std::vector<bool>& keep,
                        const std::vector<bool>& by_use, std::size_t budget, std::uint32_t prefetch);

}  // namespace dynswap::sim
