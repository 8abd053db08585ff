// Session: masters are the truth (Invariant 6). What they are, whether they have changed, and what was
// written on handed-out tensors.
#include <utility>

#include "accelerator/torch_stream.h"
#include "core/protection.h"
#include "session/calls.h"
#include "session/module_state.h"
#include "session/session.h"
#include "tensor/handed_out.h"
#include "tensor/written_buffers.h"

namespace dynswap {

/// Follows changes of the master until a round finds none, since releasing old copies may run code that
/// changes it again (Note [Release after the change]). Returns false if the weight belongs to another master
/// by then.
bool Session::settle(Weight& weight, PyObject* master_object) {
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  for (bool again = false;; again = true) {
    DeferredRelease dropped;
    weight.follow_version();
    if (PROTECTED(changed_master_seen) && (!weight.state.is_of(master) || weight.became_plain())) {
      if (again && weight.state.impl != &master) return false;
      master_changed(weight, master_object, dropped);
    }
    if (look_is_due(weight)) {
      look_for_silent_write(weight, dropped);
      if (weight.cached != nullptr && may_refer_back(master_object)) weight.drop_tensors(dropped);
    }
    if (dropped.empty()) return true;
  }
}

/// Notes a weight that has come since the plan was made. It gets a new plan if it is still there two calls
/// later. A master that comes with each call (a cache that grows, `functional_call`) does not: each new plan
/// moves the whole model. Nor does the session keep its bytes.
void Session::note_unplanned(Weight& weight) {
  if (planning_ || abandoned_) return;  // it may be in the plan that is being made; a child makes none
  weight.drop_bytes();
  if (weight.content) weight.content = weight.content->without_bytes();
  if (weight.unplanned_since == 0) weight.unplanned_since = calls_;
  if (!inside_call_of(*this) || calls_ - weight.unplanned_since >= 2) outdated_ = true;
}

void Session::master_changed(Weight& weight, PyObject* master_object, DeferredRelease& dropped) {
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  if (weight.state.same_place(master) && weight.state.same_layout(master) && !weight.became_plain() &&
      (weight.path == Weight::AccessPath::as_is || sliced(weight) || weight.moves_bytes())) {
    const MasterState now = MasterState::of(master);
    const bool written = std::exchange(weight.state, now).version != now.version;
    weight.note_version();
    if (weight.path == Weight::AccessPath::as_is) return;
    if (sliced(weight)) return weight.forget(dropped);  // its slices are looked at when they are used
    if (written) return drop_outdated_copy(weight, dropped);
    // Frozen or thawed: the tensor that somebody has is not handed out again, but another one of its storage,
    // whose writes are known of.
    write_back(weight, dropped);
    const auto kept = weight.latest_storage;
    forget_group(weight, dropped);
    if (!kept.expired()) weight.latest_storage = kept;
    return;
  }
  weight.release_nodes(dropped);
  const std::shared_ptr<WeightTable> table = table_;
  const std::shared_ptr<const Plan> plan = weight.plan;
  const SourcePtr old = plan ? plan->engine->source(weight.id) : nullptr;
  dropped.earlier.push_back(table->replace_master(weight, master_object));
  if (weight.plan != plan)
    return weight.forget(dropped);  // Python code has run, and with it another plan came
  const bool streamed = weight.path == Weight::AccessPath::streamed;
  if (old && weight.path != Weight::AccessPath::copied && weight.source->same_shape(*old)) {
    drop_outdated_copy(weight, dropped);
    if (streamed) to_pin_.push_back(weight.shared_from_this());
  } else {
    const bool alone = old && travels_alone(weight);
    alone ? weight.forget(dropped) : forget_group(weight, dropped);
    if (old) update_source(weight, without_bytes(*old), alone);
    weight.plan = nullptr;
    weight.unplanned_since = 0;
    if (streamed) note_unplanned(weight);
  }
  if (old && old->pinned) dropped.pinned = old;
}

void Session::forget_group(Weight& weight, DeferredRelease& dropped) {
  // They share one copy. Did the session go on keeping one of them, there would be no room for the next.
  if (weight.plan) drop_companions(weight, dropped);
  weight.forget(dropped);
}

void Session::drop_companions(const Weight& weight, DeferredRelease& dropped) {
  for (const WeightId id : weight.plan->engine->companions(weight.id)) {
    Weight& other = *weight.plan->weights[id];
    if (&other == &weight || other.plan != weight.plan) continue;
    // Its writes would go where nobody looks (Note [Writes without a trace]).
    if (other.still_handed_out()) {
      other.drop_tensors(dropped);
    } else {
      other.forget(dropped);
    }
  }
}

/// Drops the copy of a weight whose master was written. Its group shares that copy: if nobody uses it yet,
/// all of the group travels at once.
void Session::drop_copy_if_written(Weight& weight, DeferredRelease& dropped) {
  weight.follow_version();
  const bool written = weight.version.enabled() && weight.version.current_version() != weight.state.version;
  if (written && weight.path == Weight::AccessPath::streamed && weight.plan && !closed_)
    drop_outdated_copy(weight, dropped);
}

void Session::drop_outdated_copy(Weight& weight, DeferredRelease& dropped) {
  const bool alone = weight.plan && travels_alone(weight);
  alone ? weight.forget(dropped) : forget_group(weight, dropped);
  weight.note_master();
  if (weight.plan) update_copy(weight, alone);
}

/// Whether somebody uses others of the weight's group, and nobody the weight. Then it alone is copied once
/// more (Note [One outdated weight of a group]). Its companions' masters are not looked at, and their copies
/// stay.
bool Session::travels_alone(const Weight& weight) const {
  const Plan& plan = *weight.plan;
  auto [group, own] = plan.engine->leases(weight.id);
  for (const WeightId id : plan.engine->companions(weight.id)) {
    const Weight& other = *plan.weights[id];
    if (other.plan != weight.plan || !other.only_cached()) continue;
    if (group > 0) --group;  // the session can let go of it
    if (&other == &weight && own > 0) --own;
  }
  return group > 0 && own == 0;
}

void Session::update_copy(Weight& weight, bool alone) {
  if (!alone) {
    // An optimizer's step changes all masters of a group, which then travels once.
    const Plan& plan = *weight.plan;
    for (const WeightId id : plan.engine->companions(weight.id)) {
      Weight& other = *plan.weights[id];
      if (other.plan == weight.plan) other.note_master();  // else its master has another size by now
    }
  }
  update_source(weight, weight.source, alone);
}

void Session::update_source(const Weight& weight, SourcePtr source, bool alone) {
  if (abandoned_) return;
  Engine& engine = *weight.plan->engine;
  alone ? engine.update_source_alone(weight.id, std::move(source))
        : engine.update_source(weight.id, std::move(source));
}

void Session::pin(WeightTable& table, const std::vector<Weight*>& weights) {
  const std::string slower = table.pin(backend_, weights);
  if (!slower.empty() && !std::exchange(said_slower_, true)) hooks_.warn(slower);
}

void Session::pin_replaced() {
  const std::vector<std::shared_ptr<Weight>> replaced = std::exchange(to_pin_, {});
  const std::shared_ptr<WeightTable> table = table_;
  std::vector<Weight*> weights;
  for (const auto& weight : replaced) {
    if (weight->plan && weight->source->has_bytes) weights.push_back(weight.get());
  }
  pin(*table, weights);
  for (const Weight* weight : weights) {
    if (weight->path == Weight::AccessPath::streamed && weight->plan && !closed_) {
      weight->plan->engine->replace_source(weight->id, weight->source);
    }
  }
}

void Session::call_begins() {
  if (offload_) offload_->call_begins();
  ++calls_;
  tell_lost();
  release_idle_nodes();
  DeferredRelease dropped;
  for (const auto& weight : std::exchange(residents_read_, {})) {
    if (weight->cached != nullptr) {
      const HandedOut* const record =
          HandedOut::of(*THPVariable_Unpack(weight->cached).unsafeGetTensorImpl());
      if (record != nullptr && record->may_be_written()) write_back(*weight, dropped);
    }
    drop_copy_if_written(*weight, dropped);
  }
}

void Session::call_ends() {
  DeferredRelease dropped;
  for (std::size_t i = 0; i < residents_read_.size(); ++i) {  // more may come while one is written back
    PyObject* const cached = residents_read_[i]->cached;
    if (cached == nullptr) continue;
    const HandedOut* const record = HandedOut::of(*THPVariable_Unpack(cached).unsafeGetTensorImpl());
    if (record == nullptr || !record->bumped()) continue;
    const std::shared_ptr<Weight> weight = residents_read_[i];
    write_back(*weight, dropped);
  }
  if (!replaced_) return;
  // The call began before the other session took over, and is over for that one, too.
  if (const std::shared_ptr<Session> next = successor_.lock()) next->call_ends();
}

/// All reads of a resident in one call see one state of its master. Any other weight, and whatever is read
/// outside a call, is looked at every time.
bool Session::look_is_due(const Weight& weight) const {
  if (!weight.moves_bytes() || closed_) return false;
  return !weight.resident() || weight.looked_at != calls_ || weight.overlaps() || !inside_call_of(*this);
}

/// What was written on handed-out tensors of masters that have some of the weight's bytes is in these bytes
/// then.
void Session::write_back_overlapping(const Weight& weight, DeferredRelease& dropped) {
  for (const std::shared_ptr<MasterRecord>& other : weight.sharing->overlapping()) {
    write_back_kept(*other);
    const auto alive = other->latest_storage.lock();
    const HandedOut* const record = alive ? HandedOut::of(*alive) : nullptr;
    if (record == nullptr) continue;
    if (const std::shared_ptr<Session> session = session_of(*record)) {
      session->write_back_latest(alive, dropped);
    } else {
      write_back_living(alive);
    }
  }
}

void Session::write_back_latest(const c10::intrusive_ptr<c10::StorageImpl>& handed_out) {
  DeferredRelease dropped;
  write_back_latest(handed_out, dropped);
}

/// A tensor that is not its weight's latest has a copy of its own, of which the plan knows nothing.
void Session::write_back_latest(const c10::intrusive_ptr<c10::StorageImpl>& handed_out,
                                DeferredRelease& dropped) {
  HandedOut& record = *HandedOut::of(*handed_out);
  const std::shared_ptr<Weight> weight = weight_of(record);
  if (weight->latest_storage.lock() == handed_out) {
    write_back(*weight, dropped);
  } else {
    record.write_back();
  }
}

void Session::look_for_silent_write(Weight& weight, DeferredRelease& dropped) {
  if (!options_.device.is_cpu() && capturing()) return;  // nothing can be taken to a master now
  if (inside_call_of(*this) && std::exchange(weight.looked_at, calls_) != calls_ && weight.resident()) {
    residents_read_.push_back(weight.shared_from_this());
  }
  if (weight.cached != nullptr) write_back(weight, dropped);
  if (weight.silently_written()) drop_outdated_copy(weight, dropped);
}

void Session::write_back(Weight& weight) {
  DeferredRelease dropped;
  write_back(weight, dropped);
}

void Session::write_back(Weight& weight, DeferredRelease& dropped) {
  write_back_kept(weight);
  const auto alive = weight.latest_storage.lock();
  HandedOut* const record = alive ? HandedOut::of(*alive) : nullptr;
  if (record == nullptr || !PROTECTED(living_written_back)) return;
  // Is nobody left but those who tell of each further alias? They may, while the bytes are looked at.
  const std::size_t telling = 1 + !weight.latest.expired() + (weight.cached_outside != nullptr);
  // Where no alias tells (HandedOut::watch_bytes()), whoever has the tensor may write to it.
  const bool kept = record->on_cpu() && weight.cached != nullptr && !weight.only_cached();
  const bool last_look = record->has_untracked_alias() && !kept && alive.use_count() <= telling;
  if (last_look) record->no_untracked_alias();
  const auto written = record->write_back(last_look);
  if (last_look && record->postponed()) record->note_untracked_alias();  // in a capture: look another time
  if (!written) return;
  if (weight.became_plain() && !closed_) {
    follow_plain(weight, *record->content(), dropped);
    record->follow_plain();
  }
  // The tensor that was written is the newest there is, so it stays the one to hand out.
  weight.note_version();
  weight.silently_written();  // the write back is no news
  if (!weight.plan || record->leased_from(*weight.plan->engine)) return;
  // The engine's copy is another one.
  const bool alone = travels_alone(weight);
  if (!alone) drop_companions(weight, dropped);
  weight.drop_tensors(dropped);
  update_copy(weight, alone);
}

/// The master was coded, and has plain values by now. Copies already made stay.
void Session::follow_plain(Weight& weight, MasterContent& content, DeferredRelease& dropped) {
  dropped.earlier.push_back(table_->follow_plain(weight, content));
  if (!weight.plan) return;
  weight.plan->engine->replace_source(weight.id, weight.source);
  to_pin_.push_back(weight.shared_from_this());
}

void Session::expect_writes(const std::vector<at::Tensor>& masters) {
  {
    DeferredRelease dropped;
    table_->for_weights(masters, [&](Weight& weight) {
      if (may_be_written(weight)) write_back(weight, dropped);
      if (weight.watch) weight.watch->expect_writes();
    });
  }
  tell_lost();
}

bool Session::may_be_written(const Weight& weight) {
  const auto alive = weight.latest_storage.lock();
  const HandedOut* const record = alive ? HandedOut::of(*alive) : nullptr;
  return record != nullptr && record->may_be_written();
}

void Session::note_lost(const std::shared_ptr<MasterRecord>& of) { lost_.note(of); }

void Session::tell_lost() {
  for (const std::shared_ptr<MasterRecord>& of : lost_.take()) {
    if (!std::exchange(static_cast<Weight&>(*of).said_lost, true)) hooks_.warn_lost(of->name);
  }
}

void Session::note_writes(const std::vector<at::Tensor>& masters) {
  DeferredRelease dropped;
  table_->for_weights(masters, [&](Weight& weight) {
    if (weight.watch) weight.watch->note_write();
    drop_copy_if_written(weight, dropped);
  });
}

std::size_t Session::sampled_bytes() const { return closed_ ? 0 : table_->sampled_bytes(); }

Weight& Session::weight_now(Weight& weight, PyObject* master_object, PyObject* name) {
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  if (weight.state.impl == &master) return weight;
  // Another master. It may be one that is known (a tie was made), or this one may be another's too (a tie was
  // broken); else it takes the old one's place in the plan.
  if (Weight* const known = table_->find(&master); known != nullptr && known->state.same_place(master)) {
    weight.unplanned_since = 0;  // it may have stood in for this one's master: such come and go
    return *known;
  }
  if (weight.holders > 1) return added_weight(master_object, name, weight.parameter, weight.casting);
  // They may be all that keeps the master alive. Releasing them may run any code, so look again.
  DeferredRelease dropped;
  if (weight.cached != nullptr) weight.drop_tensors(dropped);
  weight.release_nodes(dropped, /*if_idle=*/true);
  if (!dropped.empty()) {
    dropped.drop();
    return weight_now(weight, master_object, name);
  }
  // The weight's own master may come back, as after functional_call(): its copy on the device stays.
  if (!weight.plan || weight.master_storage.expired()) return weight;
  return added_weight(master_object, name, weight.parameter, weight.casting);
}

void Session::check(const py::object& module) {
  DeferredRelease dropped;
  for_entries(module, [&](const Entry& entry, PyObject* master) {
    if (entry.weight->state.same_place(*THPVariable_Unpack(master).unsafeGetTensorImpl())) return;
    outdated_ = true;
    // A resident's graph would keep a master that has another dtype by now from being swapped.
    entry.weight->forget(dropped);
    for (const auto& [name, part] : entry.weight->parts) part->forget(dropped);
    entry.weight->release_nodes(dropped);
  });
}

void Session::release(const py::object& module) {
  DeferredRelease dropped;
  for_entries(module, [&](const Entry& entry, PyObject*) {
    write_back_whole(*entry.weight, dropped);
    entry.weight->forget(dropped);
    for (const auto& [name, part] : entry.weight->parts) part->forget(dropped);
    entry.weight->release_nodes(dropped);
  });
}

void Session::flush_module(const py::object& module) {
  {
    DeferredRelease dropped;
    for_entries(module, [&](const Entry& entry, PyObject*) { write_back_whole(*entry.weight, dropped); });
  }
  tell_lost();
}

void Session::flush() {
  {
    DeferredRelease dropped;
    const std::shared_ptr<WeightTable> table = table_;
    for (std::size_t i = 0; i < table->weights().size(); ++i) write_back(*table->weights()[i], dropped);
  }
  tell_lost();
}

void Session::write_back_whole(Weight& weight, DeferredRelease& dropped) {
  if (weight.overlaps()) write_back_overlapping(weight, dropped);
  write_back(weight, dropped);
  for (const auto& [name, part] : weight.parts) write_back_whole(*part, dropped);
}

void Session::for_entries(const py::object& module,
                          const std::function<void(const Entry&, PyObject*)>& use) const {
  const ModuleView view(module.ptr());
  if (view.state == nullptr) return;
  // Copies: use() may write back, which may run code that adds entries. An entry may still have what has
  // stood in for its master.
  std::vector<std::pair<Entry, py::object>> found;
  for (const Entry& entry : *view.state->entries) {
    PyObject* const master = view.master(entry);
    if (entry.weight == nullptr || master == nullptr) continue;
    found.emplace_back(entry, py::reinterpret_borrow<py::object>(master));
    if (Weight* const known = table_->find(THPVariable_Unpack(master).unsafeGetTensorImpl()))
      found.back().first.weight = known->shared_from_this();
  }
  for (const auto& [entry, master] : found) use(entry, master.ptr());
}

}  // namespace dynswap
