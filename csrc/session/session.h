// One install: the weights of one model, and the engine that streams them.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/engine.h"
#include "platform/fork_safe.h"
#include "session/hooks.h"
#include "session/lost_writes.h"
#include "session/offload.h"
#include "session/options.h"
#include "session/read_whole.h"
#include "session/saved_plan.h"
#include "session/weight.h"
#include "session/weight_table.h"
#include "tensor/server.h"

namespace dynswap {

struct Visited;

struct Entry;
struct ModuleState;

/// LOCK: the GIL guards it. The engine has locks of its own.
class Session : public Server, public std::enable_shared_from_this<Session> {
 public:
  /// `budget`: of the first plan. `backend`: as make_backend() takes it.
  Session(const SessionOptions& options, const Budget& budget, const Hooks& hooks,
          const std::string& backend);
  ~Session() override;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // attach.cpp. `self` is this session as Python sees it.
  /// Plans for the modules of the tree, whoever serves them, and touches none. Throws BudgetError.
  /// Returns why the plan that was saved does not apply; then there is no draft.
  std::string draft(const py::object& root, const py::object& swap_class,
                    const std::optional<SavedPlan>& saved);
  /// Serves the modules of the draft, all at once (Note [An install takes another's place]), and then
  /// allocates. OutOfMemory: it serves them, and each access copies.
  void begin(const py::object& self);
  /// Lets modules join that no session serves; returns how many.
  std::size_t attach(const py::object& self, const py::object& root, const py::object& swap_class);
  void detach(const py::object& root);
  void adopt(const py::object& module, const py::object& name);

  /// Whether the engine's plan lacks masters that have come, or have changed their type or size. They are
  /// converted at each access until replan().
  bool outdated() const noexcept { return outdated_; }
  void check(const py::object& module);
  /// Makes a new plan, within `budget`, for the modules of `root` that this session serves, while other
  /// threads go on (Note [A plan takes another's place]). The old plan's memory is freed before the new one's
  /// is allocated. BudgetError: the old plan stays. OutOfMemory: each access copies until there is room.
  void replan(const py::object& root, const Budget& budget);

  /// The session and the weight of a master, if it is one. `moved`: it may have other memory by now.
  static std::pair<std::shared_ptr<Session>, Weight*> serving(const at::Tensor& master, bool moved = false);

  /// The weight of a master that the module has come to hold since the install.
  Weight& added_weight(PyObject* master, PyObject* name, bool parameter, Casting casting);

  /// The weight that serves an entry now that it holds `master`; `weight` served it before. It may be the
  /// same one.
  Weight& weight_now(Weight& weight, PyObject* master, PyObject* name);

  // access.cpp
  /// What an access to the weight hands out. `master` is what the module holds under the name now; a new
  /// reference. Throws the engine's errors and py::error_already_set.
  /// `inside`: by a forward, and not by somebody who looks at the model from outside.
  PyObject* access(Weight& weight, PyObject* master, bool training, bool inside);

  // names.cpp
  /// The dtype in which a module's master is handed out; that of the session for what is no master.
  std::optional<at::ScalarType> dtype_of(const py::object& module, const py::object& name) const;

  /// From now on hands a master out in its own dtype, which a forward has chosen for the buffer.
  void keep_dtype(const py::object& module, const py::object& name);

  /// A buffer as a forward gets it, for a graph of torch.compile.
  py::object fetch_buffer(const py::object& module, const py::object& name);
  /// How each of the module's masters is served, by its name.
  py::dict services(const py::object& module) const;

  // slices.cpp: see Note [Slices of a parameter]. `master` is what the module holds.
  /// Whether an access is given slices, and not the bytes.
  static bool sliced(const Weight& weight) noexcept { return weight.path == Weight::AccessPath::sliced; }
  /// One slice of a parameter; None if it is not sliced any more.
  py::object fetch_slice(const py::object& master, std::int64_t index);
  /// All of it. Inside a call: it will not be sliced any more in the next plan, which is made soon.
  py::object fetch_whole(const py::object& master);
  /// Counts a copy of all of a parameter whose slices are served. Throws BudgetError if the budget is strict.
  std::shared_ptr<void> count_whole(const Weight& weight);
  void expect_slices(const py::object& master, const std::vector<std::int64_t>& indices);
  /// Announces slices that may be asked for after those that expect_slices() was told last, the likeliest
  /// first. Returns how many calls to leave out, as they would not pay.
  std::uint32_t guess_slices(const py::object& master, const std::vector<std::int64_t>& indices);

  /// A weight that a guess reads, ahead of its use; None if it is not there, and has no room in the budget.
  py::object fetch_for_guess(const py::object& master);

  /// What access() handed out last, where nothing has changed since; null if something may have. Runs
  /// nothing.
  PyObject* access_unchanged(const Weight& weight, PyObject* master, bool inside) const;

  /// A tensor as Python sees it; for isinstance() a parameter.
  static py::object as_object(const at::Tensor& tensor, bool parameter);

  /// The weight's bytes for a backward pass; no part of a graph, nor kept. `reader` is the thread of the
  /// forward pass.
  at::Tensor fetch_again(Weight& weight, const at::Tensor& master, std::thread::id reader);

  /// Whether the weight passes through the arena, or may have to: it is moved by the engine, and not resident
  /// for good.
  bool streams(const Weight& weight) const {
    if (weight.path != Weight::AccessPath::streamed || !weight.plan) return false;
    return !weight.resident() || weight.plan->gives_way;
  }
  /// What stands in the graph for a tensor that no weight is, if saved tensors leave the device; else null.
  std::unique_ptr<Saved> offloaded(const at::Tensor& tensor) const {
    return offload_ ? offload_->keep(plan_->engine, tensor) : nullptr;
  }
  /// Null: saved tensors stay.
  const std::shared_ptr<SavedOffload>& offload() const noexcept { return offload_; }
  /// Whether some weight is copied again for a backward pass.
  bool fetches_any_again() const noexcept { return streams_any_ || table_->copies_any(); }

  /// Writes back what was written on handed-out tensors.
  void flush();
  void flush_module(const py::object& module);  ///< of this module's masters alone
  /// flush_module(), and keeps nothing by which its masters could not be swapped
  /// (`torch.utils.swap_tensors`).
  void release(const py::object& module);
  void write_back(Weight& weight);
  void write_back(Weight& weight, DeferredRelease& dropped);
  void write_back_latest(const c10::intrusive_ptr<c10::StorageImpl>& handed_out) override;
  /// The user is told by tell_lost(), when that can run code.
  void note_lost(const std::shared_ptr<MasterRecord>& of) override;
  void tell_lost();
  // given_data.cpp
  bool give_data(HandedOut& record, const at::Tensor& tensor, const at::Tensor& data,
                 const std::function<void()>& assign) override;

  /// Announces that an optimizer is about to write to these masters, and takes to them what was written on
  /// tensors handed out of them; those of other sessions are ignored.
  void expect_writes(const std::vector<at::Tensor>& masters);
  /// Counts a write to each of these masters that is not watched exactly: an optimizer has stepped, which may
  /// have bumped no version.
  void note_writes(const std::vector<at::Tensor>& masters);
  /// Bytes of masters that are sampled: a small write to them that bumps no version may go unseen.
  std::size_t sampled_bytes() const;
  Stats stats() const;
  void reset_stats();
  /// Bytes of residents that have given way.
  std::uint64_t given_way_bytes() const;
  /// Whether a CUDA graph has captured residents of the plan.
  bool captured() const noexcept { return captured_; }
  /// Frees the plan's device memory, and leaves the modules served: each access copies, until the next call
  /// of the model plans again, or replan().
  void release_memory(const py::object& root);
  /// Copies the residents of the plan that are not on the device. Does not wait for them.
  void bring_residents();
  void close();

  // figures.cpp: what dynswap_ext/inspect shows (see dynswap_ext/_C.pyi).
  py::list groups() const;
  void record(bool on);
  py::dict timeline() const;
  /// What ranks have shared out (GatheredCopies::Figures); None if this process copies for itself alone.
  py::object shared_out() const;

  /// Begins an outermost call of this session's modules: numbers it, and writes back what the call before it
  /// wrote on residents.
  void call_begins();
  /// Tells the front end that an outermost call begins; call_begins() comes before. The front end makes a new
  /// plan if the session is outdated, and returns the number of the call in its round, which the schedule
  /// gets. Then masters that were replaced are page-locked. While a CUDA graph is captured, only note_pass()
  /// is called. `self` is this session as Python sees it.
  void announce_call(const py::object& self, const py::object& module);
  /// Note [A graph has no call]: what `torch.compile(model)` runs calls no module that would be noticed. So a
  /// call begins where its graphs fetch their first weight again: the one that was fetched first, or the next
  /// if that does not come any more. A weight that is used twice in a pass makes two of it.
  /// Returns whether this fetch begins a call.
  bool note_graph_fetch(const Weight& weight);
  /// It has ended. What it wrote on residents is taken to their masters, which the program may write next.
  void call_ends();
  /// It ended with an error.
  void call_failed(const py::object& self, const py::error_already_set& error);
  /// For a recording: a pass ends here, and the next one begins.
  void note_pass();
  const Hooks& hooks() const noexcept { return hooks_; }

  /// Makes a new plan for this budget, with the residents that save the most time in the passes that were
  /// recorded (evenly spread ones, if none were), and returns the measurements. If it fails, the state is
  /// that after a failed replan().
  py::dict retune(const py::object& root, const Budget& budget);
  /// The plan and the order that was learned, for another process (SavedPlan). Throws py::value_error if
  /// there is nothing to save.
  py::dict saved_plan();

  /// Whether the calling thread is capturing a CUDA graph. Then nothing is planned: graphs know addresses.
  bool capturing() const;

  const std::string& backend() const noexcept { return backend_; }
  const at::Device& device() const noexcept { return options_.device; }
  std::optional<at::ScalarType> dtype() const noexcept { return options_.dtype; }

  std::size_t modules() const noexcept { return modules_; }  ///< that it serves
  /// Whether `other` has taken its place, or the place of one that has.
  bool succeeded_by(const Session& other) const noexcept;
  bool replaced() const noexcept { return replaced_; }
  void module_attached() noexcept { ++modules_; }
  /// The module that had these entries has left, or has died. Weights that nobody reads any more leave the
  /// next plan.
  void module_gone(std::vector<Entry>& entries);

  static void close_all();  ///< at interpreter exit
  /// Releases the gradient nodes of all sessions that nothing uses (Note [Nodes that are read outside a
  /// forward]).
  static void release_idle_nodes_of_all();
  static void abandon_all_after_fork();  ///< in the child; engines abandon themselves

 private:
  using Streamed = WeightTable::Streamed;

  std::shared_ptr<WeightTable> new_table() const;
  struct Attaching;  // attach.cpp
  /// Modules of a tree, with what is asked for each module of the tree.
  struct Served {
    struct Module {
      py::object dict;
      std::string prefix;
      std::size_t place;  ///< in the tree
      std::vector<Entry>* entries;
    };
    py::object request;  ///< a PlanRequest
    std::vector<WeightTable::Choice> choices;
    std::vector<Module> modules{};
  };
  std::shared_ptr<Attaching> survey(const py::object& root, const py::object& swap_class, bool joins);
  void swap(const py::object& self, Attaching& attaching);
  Casting casting_of_added_master(PyObject* master) const;
  void restore(PyObject* module);
  void begin_in_child();

  // plan.cpp
  struct Draft;
  struct Planning;
  /// Groups and residents that were found for the plan `measured`, to use if its masters are still the same;
  /// null: it is known that they apply.
  struct Placed {
    PriorPlan plan;
    std::shared_ptr<const Plan> measured;
  };
  std::shared_ptr<Engine> new_engine(const Budget& budget, std::optional<PriorPlan> prior = std::nullopt);
  Served requested(const py::list& modules) const;  // attach.cpp
  static Streamed find_weights(const Served& served, WeightTable& table);
  py::dict experts_in(const Served& served) const;
  static void tell_experts_apart(Served& served, const py::dict& experts);
  bool holds_all(const Streamed& streamed, const Budget& budget);
  std::pair<std::shared_ptr<const Plan>, std::vector<WeightId>> streamed_slices(
      const py::object& master, const std::vector<std::int64_t>& indices);  // slices.cpp
  void draft_weights(Draft& draft, Served& served);
  std::string draft_first(Served& served, const std::optional<SavedPlan>& saved);
  void plan_first(const std::function<void()>& swap);
  void draft_plan(Draft& draft, const std::optional<Placed>& placed, bool takes_memory = true);
  std::vector<std::vector<WeightId>> residents_on_device(const Draft& draft) const;
  void replace_plan(const py::object& root, const Budget& budget, const std::optional<Placed>& placed = {},
                    bool takes_memory = true);
  // take_over.cpp
  void take_weights(Session& earlier, const std::vector<ModuleState*>& states, DeferredRelease& dropped);
  void take_weight(Session& earlier, Weight& weight, DeferredRelease& dropped);
  void carry_out(const Draft& draft);
  void take_over(Draft& draft);
  void put_down(const Draft& draft);
  void tell_captured();
  // slices.cpp
  bool serve_largest_by_slices(const BudgetError& error);

  // masters.cpp
  bool settle(Weight& weight, PyObject* master);
  void note_unplanned(Weight& weight);
  void master_changed(Weight& weight, PyObject* master, DeferredRelease& dropped);
  void drop_outdated_copy(Weight& weight, DeferredRelease& dropped);
  void drop_copy_if_written(Weight& weight, DeferredRelease& dropped);
  void pin(WeightTable& table, const std::vector<Weight*>& weights);  ///< releases the GIL for a while
  void pin_replaced();
  bool travels_alone(const Weight& weight) const;
  void follow_plain(Weight& weight, MasterContent& content, DeferredRelease& dropped);
  void update_copy(Weight& weight, bool alone);
  void update_source(const Weight& weight, SourcePtr source, bool alone);
  void forget_group(Weight& weight, DeferredRelease& dropped);
  void drop_companions(const Weight& weight, DeferredRelease& dropped);
  void remember(Weight& weight, const at::Tensor& handed_out);
  void write_back_overlapping(const Weight& weight, DeferredRelease& dropped);
  void write_back_latest(const c10::intrusive_ptr<c10::StorageImpl>& handed_out, DeferredRelease& dropped);
  void write_back_whole(Weight& weight, DeferredRelease& dropped);  ///< and the parts of a wrapper
  void for_entries(const py::object& module,
                   const std::function<void(const Entry&, PyObject* master)>& use) const;
  bool stays(const Weight& weight) const;  ///< and so do its parts
  bool look_is_due(const Weight& weight) const;
  static bool may_be_written(const Weight& weight);  ///< what was handed out of it last. Quick
  void look_for_silent_write(Weight& weight, DeferredRelease& dropped);

  // access.cpp
  // `to`: where the gradients of the master go; nowhere, if it needs none, or if that has not been asked.
  PyObject* plain_access(Weight& weight, PyObject* master, bool training, bool inside, GradientTarget to);
  PyObject* cached_tensor(const Weight& weight, PyObject* master, bool inside) const;
  at::Tensor still_handed_out(Weight& weight, const at::Tensor& master, bool watched,
                              const GradientTarget& to);
  PyObject* hand_out_again(Weight& weight, const at::Tensor& tensor, const at::Tensor& master,
                           const GradientTarget& to);
  PyObject* seen_from_outside(Weight& weight, PyObject* master, PyObject* handed_out);
  void release_idle_nodes();
  static void watch(const at::Tensor& tensor);
  PyObject* hand_out(Weight& weight, PyObject* master, bool inside, const GradientTarget& to);
  PyObject* hand_out_private(Weight& weight, const at::Tensor& master, bool watched,
                             const GradientTarget& to);
  static PyObject* wrap(const Weight& weight, const at::Tensor& tensor);
  PyObject* rebuild_wrapper(Weight& weight, PyObject* master);
  PyObject* with_class_of_master(const Weight& weight, PyObject* master, PyObject* handed_out) const;
  PyObject* convert(const Weight& weight, PyObject* master) const;
  c10::StreamId stream_id() const;

  const SessionOptions options_;
  const std::string wanted_backend_;
  const std::shared_ptr<PinnedCopies> pinned_copies_;  ///< null: nothing is page-locked
  const Hooks hooks_;
  std::string backend_;
  const std::shared_ptr<ReadWhole> read_whole_ = std::make_shared<ReadWhole>();  ///< never null
  const std::shared_ptr<SavedOffload> offload_;
  std::shared_ptr<const Plan> plan_;    ///< never null; a new one takes its place once it is carried out
  std::shared_ptr<WeightTable> table_;  ///< never null
  std::vector<std::shared_ptr<Weight>> recent_;          ///< whose latest tensor was alive at the last look
  std::vector<std::shared_ptr<Weight>> residents_read_;  ///< since the latest call began
  std::vector<std::shared_ptr<Weight>> to_pin_;          ///< whose masters were replaced since the last pass
  NodesReadOutside read_outside_;
  Stats counters_;                        ///< of earlier plans, and of copies made without an engine
  std::shared_ptr<Attaching> attaching_;  ///< between draft() and begin()
  std::shared_ptr<Draft> draft_;          ///< between draft() and begin()
  std::weak_ptr<Session> successor_;      ///< that has taken over the last of its modules
  std::size_t modules_ = 0;
  std::uint64_t calls_ = 0;  ///< how many have begun
  std::uint64_t first_in_graph_ =
      0;                         ///< the number of the weight with which calls of graphs begin; 0: none yet
  std::size_t since_first_ = 0;  ///< fetches of graphs
  bool streams_any_ = false;     ///< some weight is not resident
  bool outdated_ = false;
  bool closed_ = false;
  bool replaced_ = false;   ///< it has a successor, or had
  bool abandoned_ = false;  ///< this is a forked child
  bool in_child_ = false;   ///< and knows it
  bool recording_ = false;
  bool captured_ = false;  ///< residents have gone into a graph since the plan was made
  bool said_slower_ = false;
  bool said_whole_ = false;
  LostWrites lost_;
  Mutex planning_mutex_;                     ///< held while a new plan is made; waited for without the GIL
  std::optional<std::thread::id> planning_;  ///< the thread that makes it, if one does
};

/// Whose bytes were handed out, and by which session; null if that is gone. Every server is a session, and
/// every record of a master that it has is a weight. LOCK: the GIL.
std::shared_ptr<Weight> weight_of(const HandedOut& record);
std::shared_ptr<Session> session_of(const HandedOut& record);

/// A master on a device, through torch's own `to`, whatever install another thread ends meanwhile.
py::object copied_by_torch(const py::object& master, const at::Device& device, at::ScalarType dtype,
                           bool copy);

}  // namespace dynswap
