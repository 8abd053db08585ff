// The order of groups, learned from the accesses themselves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace dynswap {

/// Predicts the next group from the last few: what followed the longest known run of them. A run of one
/// is enough for a plain chain of layers; longer ones tell apart the places of a group that is used
/// several times in a pass. The end of a pass is followed by the beginning of the next, so nothing has
/// to be told where a pass ends.
///
/// Note [What follows a call]
/// Where several models share an engine, what follows depends on more than the last groups: a denoiser's last
/// group is followed by its first one 29 times, and then by the decoder's. So whoever knows the calls numbers
/// them by their place in a round (the text encoder's, the denoiser's first, its second, ...). Of each number
/// the schedule learns how many groups the call uses, which call comes next, and that call's first group.
///
/// Invariant 5 (a prediction, never a promise): a surprise changes only the runs it contradicts, and a
/// run that has been confirmed survives one contradiction, so that a branch not taken or one pass of
/// probes (hasattr over all modules) unlearns nothing.
///
/// Not thread-safe: the engine calls it under its mutex.
class Schedule {
 public:
  using Group = std::uint32_t;

  /// One consumer's place in the order: the last groups that it used.
  class Cursor {
   public:
    /// The group in use, if any has been used.
    std::optional<Group> current() const noexcept;

   private:
    friend class Schedule;
    static constexpr std::size_t kLongest = 8;
    std::uint32_t call_ = 0;   ///< its number; 0: calls are not told
    std::uint32_t moves_ = 0;  ///< to another group, since the call began
    void push(Group group) noexcept;
    std::uint64_t key(std::size_t length) const noexcept;  ///< of the last `length` groups
    std::array<Group, kLongest> last_{};                   ///< last_[0] is the latest
    std::size_t size_ = 0;
  };

  /// Expects the groups in this order, cyclically, until the accesses say otherwise.
  void prime(const std::vector<Group>& order);

  /// Learns this order, in which a group may be used several times, as two passes would teach it.
  void learn(const std::vector<Group>& order);

  /// The order in which groups are expected after `first`, up to where it repeats itself; empty if it does
  /// not. `groups`: how many there are.
  std::vector<Group> order_after(Group first, std::size_t groups) const;

  /// A call with this number begins (Note [What follows a call]). Numbers are consecutive; 0 is none.
  void begin_call(Cursor& cursor, std::uint32_t call);

  /// `cursor` uses `group`. Returns false (and learns nothing) if it was in use already.
  bool observe(Cursor& cursor, Group group);

  /// The group expected after the cursor's, and moves the cursor there. Does not learn.
  std::optional<Group> advance(Cursor& cursor) const;

 private:
  static constexpr std::array<std::size_t, 4> kLengths{8, 4, 2, 1};
  static constexpr std::size_t kMostRuns = 1u << 16;  ///< a table; random orders must not grow it for ever

  struct Successor {
    Group next = 0;
    bool confirmed = false;
  };

  /// What followed which run. Open addressing in one block of memory, which grows by doubling: see Note
  /// [Small blocks pin large holes].
  class Runs {
   public:
    void reserve(std::size_t runs);
    const Successor* find(std::uint64_t key) const noexcept;
    /// The run's successor, and whether it is new (then it is `next`).
    std::pair<Successor*, bool> try_emplace(std::uint64_t key, Group next);
    std::size_t size() const noexcept { return size_; }
    void clear() noexcept;

   private:
    struct Entry {
      std::uint64_t key = 0;
      Successor successor;
      bool used = false;
    };
    std::size_t place_of(std::uint64_t key) const noexcept;  ///< where it is, or would go
    std::vector<Entry> entries_;                             ///< a power of two, at most half of them used
    std::size_t size_ = 0;
  };
  std::array<Runs, kLengths.size()> runs_;

  /// Like a run's successor, what a call is followed by survives one contradiction.
  struct Call {
    std::optional<Group> first;  ///< that it uses
    std::optional<Group> last;
    std::uint32_t moves = 0;
    std::uint32_t next = 0;  ///< 0: not known yet
    bool confirmed = false;
  };
  std::optional<Group> first_after(Cursor& cursor) const;
  std::vector<Call> calls_;  ///< by number
};

}  // namespace dynswap
