// Session: its life, and what all its parts share.
#include "session/session.h"

#include <unordered_set>
#include <utility>

#include "accelerator/torch_stream.h"
#include "session/module_state.h"
#include "tensor/record_stream.h"

namespace dynswap {

namespace {

/// LOCK: the GIL.
std::unordered_set<Session*>& sessions() {
  static auto* const all = new std::unordered_set<Session*>();
  return *all;
}

}  // namespace

std::shared_ptr<Weight> weight_of(const HandedOut& record) {
  return std::static_pointer_cast<Weight>(record.origin().master);
}

std::shared_ptr<Session> session_of(const HandedOut& record) {
  return std::static_pointer_cast<Session>(record.origin().server.lock());
}

Session::Session(const SessionOptions& options, const Budget& budget, const Hooks& hooks,
                 const std::string& backend)
    : options_(options),
      wanted_backend_(backend),
      pinned_copies_(options_.page_locks ? std::make_shared<PinnedCopies>() : nullptr),
      hooks_(hooks),
      offload_(!budget.activations ? nullptr
                                   : std::make_shared<SavedOffload>(
                                         options_.device, *budget.activations, options_.activations_folder,
                                         options_.page_locks, options_.keep,
                                         [warn = hooks_.warn](const std::string& said) { warn(said); })),
      table_(new_table()) {
  if (!device().is_cpu()) hear_of_record_stream(device().type());
  const auto plan = std::make_shared<Plan>(budget);
  plan->engine = new_engine(budget);
  plan_ = plan;
  sessions().insert(this);
}

Session::~Session() {
  sessions().erase(this);
  close();
  for (const auto& weight : table_->weights()) weight->plan = nullptr;
}

void Session::module_gone(std::vector<Entry>& entries) {
  DeferredRelease dropped;
  for (Entry& entry : entries) {
    const std::shared_ptr<Weight> weight = entry.weight;
    entry.bind(nullptr);
    if (weight == nullptr || weight->holders > 0) continue;
    weight->release_nodes(dropped);
    if (weight->plan) outdated_ = true;
  }
  if (--modules_ == 0) close();
}

void Session::close() {
  if (std::exchange(closed_, true)) return;
  const std::shared_ptr<WeightTable> table = table_;
  DeferredRelease dropped;
  for (const auto& weight : table->weights()) weight->forget(dropped);
  read_outside_.release_all(dropped.nodes);
  dropped.drop();
  if (abandoned_) return;
  if (offload_) offload_->finish();
  {
    const std::shared_ptr<const Plan> plan = plan_;
    const py::gil_scoped_release release;
    if (options_.ranks) options_.ranks->close();
    plan->engine->close();
  }
  if (options_.ranks) options_.close_groups();
  table->drop_bytes();
}

bool Session::succeeded_by(const Session& other) const noexcept {
  if (!replaced_) return false;
  const std::shared_ptr<const Session> next = successor_.lock();
  return next != nullptr && (next.get() == &other || next->succeeded_by(other));
}

void Session::close_all() {
  const std::unordered_set<Session*> all = sessions();
  for (Session* session : all) session->close();
}

void Session::release_idle_nodes_of_all() {
  std::vector<std::shared_ptr<Session>> all;
  for (Session* session : sessions()) all.push_back(session->weak_from_this().lock());
  for (const auto& session : all) {
    if (session) session->release_idle_nodes();
  }
}

void Session::abandon_all_after_fork() {
  for (Session* session : sessions()) {
    session->abandoned_ = true;
    session->table_->abandon();
  }
}

Stats Session::stats() const {
  Stats stats = plan_->engine->stats();
  stats.add_counters(counters_);
  if (offload_) {
    stats.offloaded_bytes = offload_->figures().out_bytes;
    stats.restored_bytes += offload_->figures().in_bytes;
    stats.saved_bytes = offload_->figures().peak_bytes;
    stats.saved_step_bytes = offload_->figures().step_bytes;
  }
  // What the session keeps for itself is not handed out.
  for (const auto& weight : table_->weights()) {
    if (weight->only_cached() && stats.live_leases > 0) --stats.live_leases;
    if (!weight->source || !weight->source->has_bytes) continue;
    const Source& source = *weight->source;
    if (source.of_file) {
      stats.mapped_bytes += source.stored_bytes();
    } else if (!options_.device.is_cpu()) {  // the CPU reads RAM as it is
      (source.pinned ? stats.pinned_bytes : stats.staged_bytes) += source.stored_bytes();
    }
  }
  return stats;
}

std::uint64_t Session::given_way_bytes() const {
  return plan_->engine->stats().given_way_bytes + counters_.given_way_bytes;
}

void Session::reset_stats() {
  counters_ = Stats();
  plan_->engine->reset_counters();
  if (offload_) offload_->reset_figures();
}

c10::StreamId Session::stream_id() const {
  return options_.device.is_cpu() ? 0 : torch_stream(options_.device).id();
}

bool Session::capturing() const { return dynswap::capturing(options_.device); }

std::pair<std::shared_ptr<Session>, Weight*> Session::serving(const at::Tensor& master, bool moved) {
  const c10::TensorImpl& impl = *master.unsafeGetTensorImpl();
  for (Session* session : sessions()) {
    if (session->closed_ || session->abandoned_) continue;
    Weight* const weight = session->table_->find(&impl);
    if (weight != nullptr && !weight->superseded && (moved || weight->state.same_place(impl)))
      return {session->shared_from_this(), weight};
  }
  return {};
}

/// The engine stays with the parent, whose threads it has. In the child each access copies, if it computes on
/// the CPU: a driver serves only the process that began with it, and would say "initialization error".
void Session::begin_in_child() {
  if (!options_.device.is_cpu()) {
    throw DeviceError("this is a forked process, and weights cannot be brought to '" + options_.device.str() +
                      "' in it: the device's driver serves only the process that began to use it. Start the "
                      "process with the 'spawn' method, or read masters (state_dict(), parameters()) that "
                      "are in RAM");
  }
  in_child_ = true;
  DeferredRelease dropped;
  for (const auto& weight : table_->weights()) {
    weight->plan = nullptr;
    weight->drop_tensors(dropped);
  }
}

}  // namespace dynswap
