// Copies of which each rank brings a part from the host's memory, and the devices exchange the parts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "mesh/ranks.h"
#include "mesh/shared_group.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// Note [Each rank brings a part]
/// N ranks that run the same program need the same groups of weights in the same order. Of each, a rank
/// copies the part that is its own, 1/N of the bytes, and all gather the parts on their devices, whose links
/// are faster than the bus.
///
/// A collective that only some ranks begin never ends, and one that is of another group on another rank
/// brings wrong bytes. So nothing that a rank happens to do decides on collectives. In a pass (from one
/// outermost call of the model to the next), each rank begins just those of the order in force, in that
/// order. If the engine asks for the group that comes next, the bytes go to its place. If it asks for one a
/// little later, those before it go to a scratch, since other ranks may be waiting. So do those that it has
/// not asked for after a while, or when the next pass begins. What is asked for otherwise is copied whole. So
/// every order of accesses gets the right bytes, and one that all ranks share costs 1/N of them. A rank that
/// does not call the model for a while, and finds that another one has, takes part in that pass in this way:
/// ranks may call it as often as they like.
///
/// The order in force is decided by what all ranks know. When a pass begins, each tells the others a digest
/// of the groups that it copied in the pass before, and hears what they told one pass earlier, which has
/// arrived by then. If that was the same of all, it is the order from now on; if not, there is none.
///
/// A rank that uninstalls the model tells so when it takes part in a last pass. From the next on, the others
/// copy whole groups.
///
/// The digest names each group's bytes by the file, or the shared segment, that has them, and by their place
/// in it (an Identity). So only masters of which the ranks have physically one copy are gathered, and none
/// can be another one on another rank. A rank that has written to its private mapping of a file (Note
/// [Private pages]) copies that weight whole. For the others, it still brings what the file has.
class GatheredCopies : public std::enable_shared_from_this<GatheredCopies> {
 public:
  /// Where a source's bytes are, as a number that all ranks of the host agree on; 0 if other ranks may have
  /// other bytes, as far as can be told now. It is asked for at each copy.
  using Identity = std::function<std::uint64_t(const Source&)>;

  using Milliseconds = std::chrono::milliseconds;

  /// `always`: also where copies of whole groups are faster. `patience`: how long a rank may let the others
  /// wait for a group, or a pass, that it does not ask for itself.
  GatheredCopies(std::unique_ptr<Ranks> ranks, Identity identity, bool always,
                 Milliseconds patience = Milliseconds(500));
  ~GatheredCopies();
  GatheredCopies(const GatheredCopies&) = delete;
  GatheredCopies& operator=(const GatheredCopies&) = delete;

  /// Whether all ranks have the same bytes, as far as can be told now.
  bool may_gather(const Source& source) const { return identity_(source) != 0; }

  /// A backend that gathers, as far as there is an order, what an engine would copy with `inner`.
  std::unique_ptr<Backend> around(std::unique_ptr<Backend> inner);

  /// An outermost call begins. Throws SourceError if another rank does not take part in time; once, and from
  /// then on groups are copied whole. Does nothing after close(), and in a forked child.
  void begin_pass();

  /// Tells the other ranks that this one takes no further part, and waits until all have heard it.
  /// Idempotent; a second caller waits for the first.
  void close() noexcept;

  struct Figures {
    std::uint64_t passes = 0;          ///< outermost calls, of any rank
    std::uint64_t for_others = 0;      ///< of those, made by other ranks alone
    std::uint64_t order = 0;           ///< groups in the order in force
    std::uint64_t gathered = 0;        ///< groups that this rank has used
    std::uint64_t unused = 0;          ///< groups that it has gathered for other ranks
    std::uint64_t whole = 0;           ///< groups copied whole that could have been gathered
    std::uint64_t received_bytes = 0;  ///< that came from other ranks
    std::uint64_t private_bytes = 0;   ///< copied of masters of which other ranks may have other bytes
    double whole_speed = 0;            ///< bytes a second of copies of whole groups; 0: not measured
    double gather_speed = 0;           ///< and of gathered ones
    std::string why_not;               ///< why there is no order in force; empty if there is one
  };
  Figures figures() const;
  /// What the user is to be told of, once; empty if there is nothing.
  std::string take_complaint();

 private:
  friend class GatheringBackend;
  class Gathered;
  using Timed = std::vector<std::pair<EventPtr, std::uint64_t>>;

  enum class Pass : std::uint8_t { of_this_rank, of_others, last };
  bool all_private() const noexcept;
  std::string why_no_order() const;
  SharedPart shared_part_of(const WholeGroup& group) const;
  SharedGroupPtr shared(const WholeGroup& group, const SharedPart& part) const;
  EventPtr copy(const std::shared_ptr<Backend>& inner, CopyRequest request, const SharedGroupPtr& group);
  EventPtr copy_whole(Backend& inner, CopyRequest request);
  void enqueue(std::shared_ptr<Gathered> task);
  void gather_unused(std::size_t end);
  void add_settled(const EventPtr& event, std::vector<EventPtr>& settled);
  void wait(Gathered& copy);
  void let_go_of(const Backend& inner) noexcept;
  void begin_next_pass(Pass pass);
  void note_pass(std::uint64_t pass) noexcept;
  void free_scratch(std::uint64_t pass) noexcept;
  bool take_part_in_next_pass(std::unique_lock<Mutex>& lock) noexcept;
  void work();
  bool can_begin(const Gathered& task) const noexcept;
  void drop_queue(std::unique_lock<Mutex>& lock);
  void run(Gathered& task);
  void start(Gathered& task);
  void fail(std::string why) noexcept;
  bool decide(const std::vector<Ranks::Words>& told);
  void copy_whole_again(Gathered& copy);

  const Identity identity_;
  const std::size_t rank_, ranks_in_all_;
  const Milliseconds patience_;
  Mutex one_pass_;  ///< held while a pass begins, and by close()

  std::atomic<bool> measuring_;      ///< how fast copies are
  std::atomic<bool> raised_{false};  ///< somebody has been told that it has failed

  // Of the thread, and then of close().
  Memory scratch_;
  std::size_t scratch_bytes_ = 0;
  std::uint64_t scratch_pass_ = 0;       ///< in which it was used last
  std::shared_ptr<Backend> scratch_by_;  ///< whose event `scratch_used_` is
  EventPtr scratch_used_;

  mutable Mutex mutex_;
  Condition changed_;  ///< there is something to do, or a copy has been issued
  // LOCK: mutex_, all below. No group is freed under it: what a source's owner does then is not known here.
  std::shared_ptr<Ranks> ranks_;                ///< until close()
  std::vector<std::shared_ptr<Backend>> open_;  ///< what around() was given, until it is closed
  std::vector<SharedGroupPtr> order_;
  std::size_t next_ = 0;                 ///< of order_
  std::vector<SharedGroupPtr> copied_;   ///< in this pass, in order
  std::vector<SharedGroupPtr> told_of_;  ///< what the others were told of when it began
  std::unique_ptr<Ranks::Told> told_;
  std::deque<std::shared_ptr<Gathered>> queue_;  ///< the front is being worked on
  bool to_note_ = false;                         ///< where this rank is
  Timed whole_, gathered_;                       ///< copies of this pass, and their bytes
  std::string failed_;                           ///< why nothing is gathered any more
  std::string left_;                             ///< who has, so that nothing is gathered any more
  bool slower_ = false;
  bool differ_ = false;  ///< the ranks have told different things
  bool closed_ = false;
  bool complained_ = false;
  std::uint64_t shared_in_pass_ = 0;  ///< the latest with an order
  std::uint64_t shared_then_ = 0;     ///< groups in it
  Figures figures_;
  std::optional<Thread> thread_;
};

}  // namespace dynswap
