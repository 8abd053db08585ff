// Which groups stay on the device, and how much memory the others pass through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynswap {

/// See Note [Tiny weights stay] (engine_groups.cpp): all of them together are at most this part of the model.
constexpr std::size_t kTinyPartOfModel = 128;

struct ResidencyPlan {
  std::vector<bool> resident;  ///< a group each
  std::size_t resident_bytes = 0;
  std::size_t arena_bytes = 0;
  std::uint32_t depth = 0;  ///< streamed groups that fit ahead of the current one, wherever it is
};

/// Static, strided residency for a cyclic scan. LRU would miss everything; keeping a fixed set and
/// streaming the rest through a small ring misses the least, and residents spread evenly between
/// streamed groups give each copy the most time (docs/decisions/005-static-strided-residency.md).
///
/// `bytes`: the groups' sizes in the order of use. `budget` 0: no residents, only the ring.
/// The ring holds any `prefetch` + 1 consecutive streamed groups, with room to spare where the budget
/// allows; where it is too small for that, fewer. Among the sets that fit, the one that streams the
/// fewest bytes. A larger budget never streams more, but for one group
/// (Note [A larger budget never streams more]).
/// Throws BudgetError if the largest group does not fit.
ResidencyPlan plan_residency(const std::vector<std::size_t>& bytes, std::size_t budget,
                             std::uint32_t prefetch);

/// The same, with the groups of `stay` resident in any case: but where a budget has no room for them beside
/// the largest of the others, they are like others.
ResidencyPlan plan_residency(const std::vector<std::size_t>& bytes, const std::vector<bool>& stay,
                             std::size_t budget, std::uint32_t prefetch);

/// The same, with the groups of `keep` resident in any case, which leave room for the largest of the others.
ResidencyPlan plan_residency(const std::vector<std::size_t>& bytes, const std::vector<bool>& keep,
                             const std::vector<bool>& stay, std::size_t budget, std::uint32_t prefetch);

/// Residents of no more than so many bytes, and those of `stay` in any case. Those of `on_device` come first,
/// which need no copy any more; of each kind a share spread evenly. None are `by_use`.
std::vector<bool> residents_within(std::size_t most, const std::vector<std::size_t>& bytes,
                                   const std::vector<bool>& stay, const std::vector<bool>& on_device,
                                   const std::vector<bool>& by_use);

/// The plan in which just these groups are resident, and the others have the rest of the budget.
/// Throws BudgetError if that does not hold the largest of them.
ResidencyPlan residency_of(const std::vector<bool>& resident, const std::vector<std::size_t>& bytes,
                           std::size_t budget, std::uint32_t prefetch);

}  // namespace dynswap
