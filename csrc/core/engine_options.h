// What an engine is asked to do, and how its weights and groups are numbered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace dynswap {

using WeightId = std::uint32_t;
using GroupId = std::uint32_t;

/// Groups and residents that were chosen earlier for the same weights, and the order of use.
struct PriorPlan {
  std::vector<GroupId> group_of;  ///< each weight's group, numbered in the order of add_weight()
  std::vector<bool> resident;     ///< each group; empty: groups and residents are chosen anew
  std::size_t cache_bytes = 0;    ///< the least for those by use
  std::vector<GroupId> order;     ///< of the streamed groups in a pass; empty: as they are numbered
};

struct EngineOptions {
  std::size_t budget = 0;               ///< bytes of arena + residents; 0: just the ring for `prefetch`
  std::uint32_t prefetch = 2;           ///< groups to have ahead of the one in use
  bool strict_budget = false;           ///< raise BudgetError instead of allocating outside the arena
  std::size_t short_lived_bytes = 0;    ///< for groups that come and go; 0: there are none
  bool residents_give_way = false;      ///< see Note [Residents give way]
  std::size_t group_bytes = 4u << 20;   ///< small weights travel together until a group has this many bytes
  std::size_t split_bytes = 64u << 20;  ///< a module with more than this is cut between its weights
  /// A plan for just these weights.
  std::optional<PriorPlan> prior;
};

/// How a weight is to be served.
struct WeightOptions {
  bool at_once = false;  ///< all of its unit is needed at the same time: never cut, and every budget holds it
  std::uint32_t model = 0;    ///< of those that share the engine: weights of two never share a group
  bool keep = false;          ///< stays on the device in any case
  bool of_this_rank = false;  ///< other ranks may have other bytes: it lies behind the others of its group
  bool by_use = false;  ///< its unit is a group of its own, used without an order (Note [Groups by use])
};

}  // namespace dynswap
