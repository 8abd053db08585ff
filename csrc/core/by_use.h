// Groups that are used without an order, such as the experts of a mixture: which of them stay on the device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/residency.h"

namespace dynswap {

/// Note [Groups by use]
/// A router chooses some of the experts for each token. Their order is not cyclic (but see Note [Experts in a
/// fixed order]), and a static set of residents is right only as often as chance has it. So these groups
/// (`by_use`) are no part of the schedule. They pass through an arena of their own, the cache, in which the
/// group that was used least gives way (UseScore). By default, groups in the order of use come first: they
/// are needed in each pass, a group by use only if it is chosen. What they leave of the budget is the
/// cache's. After measured passes, time decides (Note [Room for experts by time]).

/// How much a group was used, and how recently: each use counts half of one that is a half-life later. Which
/// of two groups has more does not change while neither is used, so that nothing has to be aged.
class UseScore {
 public:
  /// Counts a use at time `now`, in half-lives.
  void add(double now) noexcept;
  /// Rises with the score. 0: never used.
  std::uint64_t rank() const noexcept;

 private:
  double log2_ = 0;  ///< of the sum over all uses of 2^when; 0: never used
};

/// Note [Experts in a fixed order]
/// A long prompt uses all experts in each pass, and so does a router that only weighs them. Then they come in
/// a fixed order. If a group was followed by the same group the last two times that it came after the same
/// other one, that group is expected next (forward and backward come from opposite sides). If those two times
/// differ, as a router's choices do, nothing is expected, and neither before several groups in a row have
/// come as expected: a router repeats itself by chance. In a fixed order the group that was used least
/// recently comes next, so what is fetched ahead takes the place of the latest one, and the others stay.
class UseOrder {
 public:
  using Group = std::uint32_t;

  /// One consumer's place in the order: the last two groups that it used.
  struct Cursor {
    std::optional<Group> before, current;
    std::uint32_t as_expected = 0;  ///< uses in a row
  };

  explicit UseOrder(std::size_t groups = 0) : followed_(groups) {}

  /// `cursor` uses `group`. Returns false (and learns nothing) if it was in use already.
  bool observe(Cursor& cursor, Group group);

  /// Whether the cursor follows a fixed order.
  static bool is_fixed(const Cursor& cursor) noexcept;

  /// The group that is expected after the cursor's, and moves the cursor there.
  std::optional<Group> advance(Cursor& cursor) const;

 private:
  /// A use of a group, by its neighbours: it came after `before`, and `next` came after it.
  struct Followed {
    std::optional<Group> before;
    Group next = 0;
    bool twice = false;  ///< `next` came both of the last two times
  };
  std::vector<std::array<Followed, 2>> followed_;  ///< the later one first
};

/// Note [Experts of the next layer]
/// Applied to what the router of a layer gets, the router of the next one names most of the experts that it
/// will choose (dynswap_ext/_swap/next_experts.py). Copies of those that are not there can be issued before
/// it has chosen. A wrong one costs nothing while the bus is idle, but what is needed waits behind it if it
/// is still on its way by then. And the more of the experts are there already, the fewer of the named ones
/// that are not there are right. So what came of earlier guesses decides how many copies are worth it, if any
/// (GuessLimit). Nobody having read them, wrong guesses give way as their use has it, like any other expert.

/// How many copies to issue by a guess.
class GuessLimit {
 public:
  std::size_t most() const noexcept { return static_cast<std::size_t>(most_); }

  /// What came of the latest guess: how many copies were needed, how many were not, and how many of these
  /// were still on their way when something was. Returns how many guesses to leave out from now on: they have
  /// cost more than they saved.
  std::uint32_t learn(std::size_t right, std::size_t wrong, std::size_t in_the_way) noexcept;

 private:
  double most_ = 1;
  double worth_ = 0;         ///< of a guess, in copies: the later ones count more
  std::uint32_t pause_ = 8;  ///< guesses to leave out if they do not pay
};

/// The half-life, in uses of any group: for two uses of each that the cache holds. A longer one is better
/// where some experts are always used more than others, a shorter one where a choice repeats the one before
/// (docs/decisions/025-experts-stay-by-use.md).
double half_life(std::size_t cache_bytes, const Groups& groups);

}  // namespace dynswap
