// Which groups stay on the device, and how much memory the others pass through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace dynswap {

/// All tiny weights together are at most this part of the model: see Note [Tiny weights stay]
/// (layout_groups.cpp).
constexpr std::size_t kTinyPartOfModel = 128;

/// What a plan has to know of a group.
struct GroupTraits {
  std::size_t bytes = 0;
  bool keep = false;       ///< resident in any case
  bool tiny = false;       ///< of tiny units alone: resident too, where the budget has room for that
  bool by_use = false;     ///< used without an order (Note [Groups by use])
  bool on_device = false;  ///< resident in the plan before, so that it needs no copy
};
using Groups = std::vector<GroupTraits>;  ///< in the order of use, but for those by use

struct ResidencyPlan {
  std::vector<bool> resident;  ///< a group each; those by use are not
  std::size_t resident_bytes = 0;
  std::size_t arena_bytes = 0;
  std::uint32_t depth = 0;      ///< streamed groups that fit ahead of the current one, wherever it is
  std::size_t cache_bytes = 0;  ///< for groups by use
};

/// Leaves out the groups that have `trait`, solves the rest, and gives the residents of that answer their
/// places among all groups. What was left out is resident, unless it is used without an order.
template <class Solve>
auto solve_without(bool GroupTraits::* trait, const Groups& groups, const Solve& solve) {
  Groups others;
  for (const GroupTraits& group : groups) {
    if (!(group.*trait)) others.push_back(group);
  }
  auto answer = solve(others);
  const std::vector<bool> of_others = std::exchange(answer.resident, {});
  auto next = of_others.begin();
  for (const GroupTraits& group : groups) answer.resident.push_back(group.*trait ? !group.by_use : *next++);
  return answer;
}

/// What a budget has to hold: what is kept, the largest of the other groups in an order, and the largest by
/// use.
std::size_t least_budget(const Groups& groups);

/// Static, strided residency for a cyclic scan. LRU would miss everything; keeping a fixed set and
/// streaming the rest through a small ring misses the least, and residents spread evenly between
/// streamed groups give each copy the most time (docs/decisions/005-static-strided-residency.md).
///
/// `budget` 0: no residents but those that are kept or tiny, only the ring.
/// The ring holds any `prefetch` + 1 consecutive streamed groups, with room to spare where the budget
/// allows; where it is too small for that, fewer. Among the sets that fit, the one that streams the
/// fewest bytes. A larger budget never streams more, but for one group
/// (Note [A larger budget never streams more]). Tiny groups are like others where a budget has no room for
/// all of them and the largest of the others. Where there are groups by use and the budget is small, the
/// cache holds `prefetch` + 1 of the largest, or as many as fit; one at least.
///
/// What is kept has to fit into the budget. Throws BudgetError if the largest of the other groups does not,
/// or the largest of each kind.
ResidencyPlan plan_residency(const Groups& groups, std::size_t budget, std::uint32_t prefetch);

/// Residents of no more than so many bytes, and those that are kept in any case. Groups on the device come
/// first; of each kind a share spread evenly. No group by use is resident unless it is kept.
std::vector<bool> residents_within(std::size_t most, const Groups& groups);

/// The plan in which just these groups are resident, those by use have at least `cache_bytes`, and the others
/// the rest of the budget. What they cannot use is the cache's too.
/// Throws BudgetError if that does not hold the largest of them.
ResidencyPlan residency_of(std::vector<bool> resident, const Groups& groups, std::size_t cache_bytes,
                           std::size_t budget, std::uint32_t prefetch);

}  // namespace dynswap
