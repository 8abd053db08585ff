// The engine: decides what is copied when, and where to; hands out leases on what is there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/backend.h"
#include "core/by_use.h"
#include "core/check.h"
#include "core/device_copy.h"
#include "core/engine_options.h"
#include "core/figures.h"
#include "core/layout.h"
#include "core/recorder.h"
#include "core/residency.h"
#include "core/schedule.h"
#include "core/stats.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// What an access has to do with the order of accesses.
struct Use {
  /// The thread whose place in the schedule the use moves: that of the forward pass, also in a backward pass
  /// on another thread, which goes on where the forward pass ended.
  std::thread::id thread = std::this_thread::get_id();
  /// False for a probe: nothing is learned from it, and nothing fetched ahead.
  bool in_order = true;
  /// A resident's new copy comes after all that the consumer has been given so far: replays of graphs read
  /// residents, and hold no lease.
  bool after_consumer = false;
};

class Engine;

/// What a handed-out tensor holds on its slot until its storage dies (Invariant 1). Move-only; dropping
/// it records an event on every stream that used it. May be dropped on any thread, also after
/// Engine::close(): it keeps the memory, and the engine, alive.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&&) noexcept = default;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { release(); }

  explicit operator bool() const noexcept { return copy_ != nullptr; }
  /// The weight's first byte on the device.
  std::byte* data() const noexcept { return data_; }
  bool from(const Engine& engine) const noexcept { return engine_.get() == &engine; }
  /// The bytes lie outside the budget.
  bool overflows() const noexcept;
  /// Declares that `consumer` reads the weight too, and makes it wait for the copy (Invariant 2).
  void use_on(Stream consumer);
  /// Declares that `consumer` reads the weight, where it has been made to wait otherwise.
  void add_reader(Stream consumer);
  void release() noexcept;

  /// Note [What a lease leaves]
  /// What is known of a weight's bytes may be of use to the weight's next lease. So the last lease on them
  /// can leave it with the copy: release() with `what`. The next lease takes it away. Nothing is left while
  /// there is another lease, or with a copy that is not handed out any more, and it is dropped when other
  /// bytes take their place. So a lease that finds it knows that there was no other lease on the bytes since.
  void release(std::shared_ptr<void> what) noexcept;
  /// What the lease before this one left; null the second time.
  std::shared_ptr<void> take_left() noexcept { return std::move(left_); }

 private:
  friend class Engine;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<DeviceCopy> copy_;
  std::size_t part_ = 0;  ///< of the copy
  std::byte* data_ = nullptr;
  std::shared_ptr<void> left_;
};

/// Thread-safe. Set-up order: add_weight()*, plan(), then acquire() from any thread.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  /// `warn` is called (without a lock) with a sentence for the user; at most once a kind.
  Engine(std::unique_ptr<Backend> backend, EngineOptions options,
         std::function<void(const std::string&)> warn = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Registers a weight, in the order in which the model is expected to use them. Weights of one `unit`
  /// (a module) travel together. Only before plan().
  WeightId add_weight(SourcePtr source, std::uint64_t unit, WeightOptions options = {});
  /// A second module, with these options, has the weight in its unit: Note [Modules that share a weight].
  void share_weight(WeightId weight, std::uint64_t unit, WeightOptions options);

  /// Whether the budget holds all weights, in the groups that arrange() would form of them; asked before it.
  bool holds_all();
  /// Forms groups, chooses residents and sizes the arena. Throws BudgetError, naming the smallest budget that
  /// works. Called once, before plan(), or by it.
  /// `on_device`: weights of this engine that are residents of the one whose place it takes, by its groups.
  /// These stay together, and are residents before others are (Note [Residents go from plan to plan]).
  void arrange(const std::vector<std::vector<WeightId>>& on_device = {});
  /// Takes the residents of the engine whose place this one takes, with the bytes in them. `ids`: for each
  /// weight of this engine, its id in `earlier`; none if `earlier` lacks it or its master has changed. The
  /// other engine is closed next, before plan(). Neither allocates nor frees memory.
  void inherit(Engine& earlier, const std::vector<std::optional<WeightId>>& ids);
  /// Takes the memory for it. Throws what arrange() does, or OutOfMemory; nothing is held then.
  void plan();

  /// Copies the residents that are not there yet. They arrive one after the other; nothing waits for them.
  void bring_residents();

  /// The calling thread begins a call of a model that shares the engine with others: Note [What follows a
  /// call].
  void begin_call(std::uint32_t call);

  /// The weight's bytes, on their way or there, ordered before later work of `consumer`.
  /// Throws SourceError if they could not be read; the next call tries again. Throws ClosedError after
  /// close(), and for a resident that the next plan has inherited.
  Lease acquire(WeightId weight, Stream consumer, Use use = {});

  /// Leases the weight's bytes like acquire(), but only if they are there and `consumer` has waited for them
  /// already; in order, only for a weight of the group that the thread uses, or of one that stays. Returns an
  /// empty lease where acquire() would have more to do: no copy is waited for, and none issued.
  Lease acquire_present(WeightId weight, Stream consumer, bool in_order);

  /// Announces that these weights, of groups by use, are acquired next, in this order. Their copies are
  /// issued now, as far as the cache has room that none of them needs before.
  void expect(const std::vector<WeightId>& weights);
  /// Tells that these weights, of groups by use, may be acquired after those that expect() was told last, the
  /// likeliest first. As many copies are issued as are worth it (Note [Experts of the next layer]). Returns
  /// how many calls may be left out from now on, as guesses do not pay.
  std::uint32_t guess(const std::vector<WeightId>& weights);
  /// Whether acquire() would find the weight there, or a place for it inside the budget.
  bool has_room(WeightId weight) const;

  /// Takes another source, as the master has changed: its bytes are elsewhere, or other ones (Invariant 6).
  /// Copies already made are not handed out any more. The new source has as many elements, of the same types.
  void update_source(WeightId weight, SourcePtr source);
  /// Takes another source as update_source() does, for a weight whose group somebody uses: the copies of its
  /// companions stay good.
  void update_source_alone(WeightId weight, SourcePtr source);
  /// Takes a source of the same bytes, to be read another way from now on. Copies already made stay good.
  void replace_source(WeightId weight, SourcePtr source);

  /// The source that the next copy will read.
  SourcePtr source(WeightId weight) const;
  /// Whether the plan lets it stay on the device. It may have given way since: stays().
  bool resident(WeightId weight) const;
  bool stays(WeightId weight) const;
  /// Returns whether the weight is a resident that is on the device. If so, it does not give way any more.
  bool keep_from_giving_way(WeightId weight);
  /// The weights of each resident that is on the device.
  std::vector<std::vector<WeightId>> residents_on_device() const;
  /// The weights that travel with this one, itself included.
  const std::vector<WeightId>& companions(WeightId weight) const;
  /// How many leases there are on its group's copy, and on itself in it.
  std::pair<std::uint32_t, std::uint32_t> leases(WeightId weight) const;

  Stats stats() const;
  void reset_counters();

  /// One group, as it is planned, and what has been counted.
  struct GroupReport {
    std::vector<WeightId> weights;
    std::size_t bytes = 0;           ///< on the device
    std::uint64_t master_bytes = 0;  ///< of its masters: what a copy reads
    bool resident = false;
    bool keep = false;            ///< resident in any case
    bool by_use = false;          ///< without an order: those that are used most stay
    std::uint64_t first_use = 0;  ///< when it was first used, after others with a smaller number; 0: never
    bool short_lived = false;     ///< of all short-lived groups together: their latest bytes, and no weights
    GroupFigures figures;
  };
  /// In the order of the weights; the last is that of the short-lived groups, if there are any. Where only
  /// the device knows when it worked, waits and copies are those of the latest recording.
  std::vector<GroupReport> groups() const;
  /// The plan, for another engine of the same weights, with the order that was learned. Residents that have
  /// given way are residents in it.
  PriorPlan plan_for_reuse() const;
  /// Whether it has the memory of its plan.
  bool planned() const;

  /// A resident's memory that lend_residents() has freed.
  struct Loan {
    GroupId group = 0;
    std::size_t bytes = 0;
    const std::byte* address = nullptr;  ///< where it was
    std::shared_ptr<DeviceCopy> copy;    ///< that was there; null: none was
    bool current = false;                ///< it was the group's
    std::uint64_t changes = 0;           ///< of its masters, by then
    Stream order = 0;                    ///< Backend::order_of() its block
  };
  /// Frees the memory of the residents that nobody uses: Note [Residents give way]. Takes only locks under
  /// which no memory is allocated or freed, and never waits for the device.
  std::vector<Loan> lend_residents();
  /// Takes memory back that has not been written since lend_residents(): what can be had at its old address.
  /// The rest has given way. All have one order, which is that of the blocks that the backend allocates now.
  /// `intact` tells whether the memory at an old address still has its bytes.
  void take_back(std::vector<Loan> loans, const std::function<bool()>& intact = nullptr);
  /// The memory went to somebody else.
  void give_up(const std::vector<Loan>& loans);
  bool residents_give_way() const noexcept { return options_.residents_give_way; }

  /// Begins a recording (and drops the one before), or ends it.
  void record(bool on);
  Timeline timeline() const { return recorder_.timeline(); }
  bool recording() const noexcept { return recorder_.on(); }
  /// For a recording: the weight is used without acquire(), or the model's call begins.
  void note_use(WeightId weight, Stream consumer);
  void note_pass(Stream consumer);
  const Backend& backend() const noexcept { return *backend_; }

  /// For what the engine's user enqueues itself: as the backend's.
  EventPtr record(Stream consumer) { return backend_->record(consumer); }
  void wait(Stream consumer, const EventPtr& event) { backend_->wait(consumer, event); }
  /// Null unless there is a recording.
  EventPtr mark(Stream consumer) { return recorder_.on() ? backend_->mark(consumer) : nullptr; }
  void synchronise(const EventPtr& event) noexcept { backend_->synchronise(event); }

  // engine_short_lived.cpp: Note [Short-lived groups].
  /// A weight of bytes that nobody has offered yet; nothing if there are too many of them.
  std::optional<WeightId> take_short_lived();
  /// The weight has its bytes in `source` (raw bytes) once `written` is done, and none on the device.
  void offer(WeightId weight, SourcePtr source, EventPtr written);
  /// The program has come to the weight, whose bytes never left the device.
  void pass_by(WeightId weight, Use use);
  /// The weight may be taken again, as its bytes are needed no more. Leases on it keep what they have.
  void give_back_short_lived(WeightId weight) noexcept;
  /// For a recording: its bytes were copied away between the marks.
  void note_copy_out(WeightId weight, EventPtr from, EventPtr to, std::size_t bytes);
  /// How many bytes of short-lived weights are on the device beside the copies.
  void note_kept(std::size_t bytes) noexcept;

  /// Counts bytes that a weight takes outside the budget, in memory that is not the engine's, for as long as
  /// the returned object lives.
  std::shared_ptr<void> count_outside(std::size_t bytes);

  /// Lets go of all device memory that no lease holds, after the copies in flight. Idempotent. Later
  /// acquire() calls throw Error.
  void close() noexcept;
  bool closed() const;

  /// Registers the handlers of fork(), if that has not been done: Note [A fork waits for engines]. The
  /// constructor calls it too.
  static void register_fork_handlers();

 private:
  friend class Lease;

  // engine_fork.cpp
  struct Registry;
  void register_engine();
  void unregister_engine() noexcept;

  using Weight = Layout::Weight;

  struct Group : Layout::Group {
    explicit Group(Layout::Group as_planned) : Layout::Group(std::move(as_planned)) {}

    bool short_lived = false;
    EventPtr written;  ///< short-lived: when the bytes of its source are there
    bool resident = false;
    bool captured = false;             ///< resident: a graph has captured it, so it does not give way
    bool inherited_by_next = false;    ///< resident: the next plan has it
    UseScore score;                    ///< by use
    Memory home;                       ///< resident: its block; null once it has given way
    std::shared_ptr<DeviceCopy> copy;  ///< the current one: on its way or there
    std::shared_ptr<DeviceCopy> home_occupant;  ///< resident: the latest copy in the group's own block
    std::uint64_t expected_at = 0;              ///< the tick of the latest look ahead that met it
    std::optional<Cause> held_back = Cause::first_use;  ///< why its next copy has not been issued yet
    std::uint64_t first_use = 0;                        ///< the tick; 0: none
    std::uint64_t changes = 0;                          ///< of its masters
    GroupFigures figures;
  };

  /// One thread's place in the order.
  struct Consumer {
    std::thread::id thread;
    Schedule::Cursor cursor;
    UseOrder::Cursor by_use;
    std::uint64_t last_use = 0;
  };

  /// A copy that has its place and waits to be issued, without the lock.
  struct Planned {
    std::shared_ptr<DeviceCopy> copy;
    std::vector<Arena::Region> displaced;  ///< what has been in its place (relative to `copy->base`)
    std::vector<SourcePtr> sources;        ///< one for each weight of the group; null: it is not copied
    bool demanded = false;
  };

  /// A copy that guess() has issued.
  struct Guess {
    GroupId group = 0;
    const DeviceCopy* copy = nullptr;  ///< only compared with the group's: it may have gone
    bool in_the_way = false;           ///< it was on its way when something was needed
  };

  /// Memory that nobody uses any more once its events are done.
  struct Retired {
    Memory memory;
    std::vector<EventPtr> after;
    std::size_t overflow_bytes = 0;     ///< outside the budget until it is freed
    bool at_once = false;               ///< Note [A plan goes before the next one comes]
    std::size_t short_lived_bytes = 0;  ///< of a short-lived group, until it is freed
  };

  /// Throws that this is a forked child, whose engines are its parent's.
  [[noreturn]] static void refuse_in_child();
  static void exchange_source(Weight& weight, SourcePtr& source);
  std::shared_ptr<DeviceCopy> outdate(WeightId id, SourcePtr& source);
  Lease lease_on(WeightId id, Stream consumer);

  Layout& layout() const;  ///< before arrange()

  // engine_place.cpp: under the lock
  Consumer& consumer_of(std::thread::id thread);
  Arena& arena_of(const Group& group) noexcept { return group.by_use ? cache_ : arena_; }
  const Arena& arena_of(const Group& group) const noexcept { return group.by_use ? cache_ : arena_; }
  std::uint64_t willingness(const DeviceCopy& copy) const noexcept;
  std::optional<std::uint64_t> may_go(const DeviceCopy& copy) const noexcept;
  bool waits_for_others(const Group& group) const;
  Planned plan_copy(GroupId id, bool demanded);
  std::optional<Cause> why_so_late(Group& group) const noexcept;
  Planned plan_renewal(WeightId id, std::vector<EventPtr> after);
  bool place_in_arena(Planned& planned, const Arena::Rank& rank);
  void place_outside(Planned& planned);
  void place_beside(Planned& planned);
  bool has_room_beside(std::size_t bytes) const noexcept;
  void bring_resident(GroupId id, std::vector<Planned>& planned);
  void look_ahead(const Schedule::Cursor& cursor, GroupId current, std::vector<Planned>& planned);
  void look_ahead_by_use(UseOrder::Cursor ahead, std::vector<Planned>& planned);
  bool prefetch(GroupId id, const Arena::Rank& rank, std::vector<Planned>& planned);
  void detach(const std::shared_ptr<DeviceCopy>& copy);
  void dispose(const std::shared_ptr<DeviceCopy>& copy);
  bool read_in_order(const DeviceCopy& copy) const noexcept;
  void drop_left(DeviceCopy::Part& part);
  void note_held_back(Group& group, GroupId current) noexcept;
  std::size_t beyond_budget() const noexcept;
  std::size_t calling_threads() const noexcept;
  std::string holders() const;
  std::string why_full() const;
  std::string remedy(std::size_t needed) const;
  void note_peak() noexcept;
  std::size_t held_bytes() const noexcept;

  // engine_issue.cpp: without the lock, but for drop_lease() and renew_outdated()
  void issue(std::vector<Planned>& planned);
  CopyRequest request(const Planned& planned) const;
  void order_after_copy(const std::shared_ptr<DeviceCopy>& copy, Stream consumer, bool prefetched);
  void use_on(const std::shared_ptr<DeviceCopy>& copy, Stream consumer);
  std::optional<Planned> renew_outdated(WeightId id, std::unique_lock<Mutex>& lock);
  void release(const std::shared_ptr<DeviceCopy>& copy, std::size_t part,
               std::shared_ptr<void> left = nullptr) noexcept;
  void drop_lease(const std::shared_ptr<DeviceCopy>& copy, std::size_t part, std::shared_ptr<void>& left);
  bool record_readers(const std::shared_ptr<DeviceCopy>& copy, std::size_t part,
                      const std::vector<Stream>& streams) noexcept;
  void release_postponed() noexcept;
  void free_retired() noexcept;

  // engine_guess.cpp
  void time_guesses(GroupId needed);
  std::uint32_t judge_guesses();

  // engine_give_way.cpp
  bool restore(const Loan& loan, Memory& memory);

  // engine_short_lived.cpp
  void reserve_short_lived();

  // engine_inherit.cpp
  bool can_inherit(const Group& group, const std::vector<std::optional<WeightId>>& ids, const Engine& earlier,
                   GroupId other) const;
  void give_back_inherited() noexcept;

  // Set before plan() returns, constant afterwards.
  std::unique_ptr<Backend> backend_;
  const EngineOptions options_;
  const std::function<void(const std::string&)> warn_;
  Memory arena_memory_;
  Memory cache_memory_;
  std::size_t planned_bytes_ = 0;   ///< of arena, cache and residents
  std::unique_ptr<Layout> layout_;  ///< until arrange(), which takes the weights and groups out of it
  ResidencyPlan residency_;         ///< from arrange() to plan()
  bool planned_ = false;

  std::atomic<bool> abandoned_{false};  ///< this is a forked child: no device or thread is touched
  std::atomic<bool> any_postponed_{false};
  Recorder recorder_;

  mutable Mutex mutex_;
  Condition issued_;  ///< some copy has left State::issuing
  // LOCK: mutex_ guards all below; of weights_ and groups_ what arrange() has set is constant.
  std::vector<Weight> weights_;
  std::vector<Group> groups_;
  Arena arena_;
  Arena cache_;  ///< of groups by use
  Schedule schedule_;
  UseOrder use_order_;
  std::vector<Guess> guesses_;  ///< of the latest guess()
  bool guesses_timed_ = true;   ///< expect() has been called since
  GuessLimit guess_limit_;
  GroupId told_ = 0;           ///< the first group of the latest expect()
  std::uint64_t told_at_ = 0;  ///< the tick of the latest expect()
  std::vector<Consumer> consumers_;
  std::vector<Retired> retired_;
  /// Leases' copies that await the end of a capture: Note [A lease that dies inside a capture].
  std::vector<std::pair<std::shared_ptr<DeviceCopy>, std::size_t>> postponed_;  ///< each with the part
  EventPtr latest_copy_;            ///< the end of the copy that was issued last
  std::size_t cold_residents_ = 0;  ///< residents that have not been copied yet
  std::size_t overflow_now_ = 0;    ///< bytes
  std::set<WeightId> free_short_lived_;
  std::size_t short_lived_now_ = 0;  ///< bytes of their copies
  std::size_t kept_ = 0;             ///< note_kept()
  std::uint64_t tick_ = 0;
  double uses_ = 0;       ///< of groups by use, in half-lives
  double half_life_ = 1;  ///< in uses
  bool closed_ = false;
  bool warned_ = false;
  Stats stats_;
};

}  // namespace dynswap
