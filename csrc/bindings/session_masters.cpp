// Session: masters are the truth (Invariant 6). What they are, whether they have changed, and what was
// written on handed-out tensors.
#include <utility>

#include "bindings/attribute.h"
#include "bindings/call.h"
#include "bindings/glue.h"
#include "bindings/handed_out.h"
#include "bindings/session.h"
#include "bindings/written_buffers.h"
#include "core/protection.h"

namespace dynswap {

/// What a master is to the session.
struct Session::Kind {
  Weight::Way way = Weight::Way::converted;
  at::ScalarType wanted = at::kFloat;
  bool dressed = false;
  std::vector<std::pair<py::object, std::shared_ptr<Weight>>> parts{};
  SourcePtr source{};  ///< if it streams
};

Session::Kind Session::kind_of(Table& table, const Weight& weight, PyObject* master_object,
                               const Mappings& mappings) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  Kind kind{.wanted = weight.exact ? master.scalar_type() : wanted_type(master, dtype_)};
  const bool plain = THPVariable_CheckExact(master_object);
  const bool lazy = !plain && PyObject_HasAttrString(master_object, "materialize") == 1;
  // There is nothing to move yet, or not any more (offloading gives a module masters without data between its
  // calls). An empty buffer may be about to be resized in place, as observers do.
  if (lazy || !has_memory(master) || (!weight.parameter && master.sym_numel() == 0)) {
    kind.way = Weight::Way::as_is;
    return kind;
  }
  const bool in_place = master.device() == device_ && master.scalar_type() == kind.wanted;
  bool streams = plain;
  if (!plain) {
    const py::module_ subclasses = py::module_::import("dynswap_ext._subclasses");
    const py::object names = subclasses.attr("inner_names")(py::handle(master_object));
    if (!names.is_none()) {
      kind.way = Weight::Way::wrapped;
      for (const py::handle inner : names) {
        const auto name = py::reinterpret_borrow<py::object>(inner);
        const py::object tensor = py::handle(master_object).attr(name);
        Weight& part = weight_of(table, tensor.ptr(), weight.name + "." + py::cast<std::string>(name),
                                 /*parameter=*/false, mappings, /*exact=*/true);
        kind.parts.emplace_back(name, part.shared_from_this());
      }
      return kind;
    }
    streams = subclasses.attr("adds_attributes_only")(py::handle(master_object)).cast<bool>();
  }
  if (streams && streamable(master) && can_move(master.scalar_type(), kind.wanted) &&
      (!in_place || mappings.find(master.const_data_ptr(), master.nbytes()))) {
    const auto source = source_of(master, kind.wanted, weight.name, mappings, table.page_cache, *table.holds);
    if (!in_place || source->file) {
      kind.way = Weight::Way::streamed;
      kind.dressed = !plain;
      kind.source = source;
      return kind;
    }
  }
  if (in_place) kind.way = Weight::Way::as_is;
  return kind;
}

void Session::classify(Table& table, Weight& weight, PyObject* master_object, const Mappings& mappings) {
  // May run Python code, or throw: until then the weight is what it was.
  Kind kind = kind_of(table, weight, master_object, mappings);
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  weight.state = MasterState::of(master);
  weight.master_storage.reset();
  if (const c10::Storage& storage = master.unsafe_storage())
    weight.master_storage = storage.getWeakStorageImpl();
  weight.version = master.version_counter();
  weight.way = kind.way;
  weight.wanted = kind.wanted;
  weight.dressed = kind.dressed;
  for (const auto& [name, part] : weight.parts) --part->holders;
  for (const auto& [name, part] : kind.parts) ++part->holders;
  weight.parts.swap(kind.parts);
  if (kind.source == nullptr) {
    weight.let_go_of_bytes();
    weight.watch = nullptr;
    return;
  }
  weight.source = kind.source;
  weight.watch_master();
}

/// Follows changes of the master until a round finds none, since releasing old copies may run code that
/// changes it again (Note [Release after the change]). Returns false if the weight belongs to another master
/// by then.
bool Session::settle(Weight& weight, PyObject* master_object) {
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  for (bool again = false;; again = true) {
    DeferredRelease dropped;
    if (PROTECTED(changed_master_seen) && !weight.state.is_of(master)) {
      if (again && weight.state.impl != &master) return false;
      master_changed(weight, master_object, dropped);
    }
    if (look_is_due(weight)) {
      look_for_silent_write(weight, dropped);
      if (weight.cached != nullptr && may_refer_back(master_object)) weight.let_go(dropped);
    }
    if (dropped.empty()) return true;
  }
}

/// Notes a weight that has come since the plan was made. It gets a new plan if it is still there two calls
/// later. A master that comes with each call (a cache that grows, `functional_call`) does not: each new plan
/// moves the whole model. Nor does the session keep its bytes.
void Session::note_unplanned(Weight& weight) {
  if (planning_ || abandoned_) return;  // it may be in the plan that is being made; a child makes none
  weight.let_go_of_bytes();
  if (weight.unplanned_since == 0) weight.unplanned_since = calls_;
  if (!inside_call_of(*this) || calls_ - weight.unplanned_since >= 2) outdated_ = true;
}

void Session::master_changed(Weight& weight, PyObject* master_object, DeferredRelease& dropped) {
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  if (weight.state.same_place(master) && weight.state.same_layout(master) &&
      (weight.way == Weight::Way::as_is || weight.way == Weight::Way::streamed)) {
    const MasterState now = MasterState::of(master);
    const bool written = std::exchange(weight.state, now).version != now.version;
    if (weight.way == Weight::Way::as_is) return;
    written ? refetch(weight, dropped) : forget_group(weight, dropped);
    return;
  }
  const std::shared_ptr<Table> table = table_;
  sweep(*table);
  table->by_master[&master] = &weight;
  const SourcePtr old = weight.plan ? weight.plan->engine->source(weight.id) : nullptr;
  classify(*table, weight, master_object, mappings_of(THPVariable_Unpack(master_object)));
  const bool streamed = weight.way == Weight::Way::streamed;
  if (old && weight.source->same_shape(*old)) {
    refetch(weight, dropped);
    if (streamed) to_pin_.push_back(weight.shared_from_this());
  } else {
    forget_group(weight, dropped);
    if (old) weight.plan->engine->update_source(weight.id, without_bytes(*old));
    weight.plan = nullptr;
    weight.unplanned_since = 0;
    if (streamed) note_unplanned(weight);
  }
  if (old && old->pinned) dropped.pinned = old;
}

void Session::forget_group(Weight& weight, DeferredRelease& dropped) {
  // They share one copy. Did the session go on keeping one of them, there would be no room for the next.
  if (weight.plan) let_companions_go(weight, dropped);
  weight.forget(dropped);
}

void Session::let_companions_go(const Weight& weight, DeferredRelease& dropped) {
  for (const WeightId id : weight.plan->engine->companions(weight.id)) {
    Weight& other = *weight.plan->weights[id];
    if (&other == &weight || other.plan != weight.plan) continue;
    // Its writes would go where nobody looks (Note [Writes without a trace]).
    if (other.still_handed_out()) {
      other.let_go(dropped);
    } else {
      other.forget(dropped);
    }
  }
}

/// Its group shares one copy: found out only when the weight is read, and when another one of the group is in
/// use by then, there would have to be two.
void Session::refetch_if_written(Weight& weight, DeferredRelease& dropped) {
  const bool written = weight.version.enabled() && weight.version.current_version() != weight.state.version;
  if (written && weight.way == Weight::Way::streamed && weight.plan && !closed_) refetch(weight, dropped);
}

void Session::refetch(Weight& weight, DeferredRelease& dropped) {
  forget_group(weight, dropped);
  if (!weight.plan) return weight.note_master();
  update_group(weight);
}

void Session::update_group(Weight& weight) {
  // An optimizer's step changes all masters of a group, which then travels once.
  const Plan& plan = *weight.plan;
  for (const WeightId id : plan.engine->companions(weight.id)) {
    Weight& other = *plan.weights[id];
    if (other.plan == weight.plan) other.note_master();  // else its master has another size by now
  }
  if (!abandoned_) plan.engine->update_source(weight.id, weight.source);
}

void Session::pin(const std::shared_ptr<Holds>& holds, const std::vector<Weight*>& weights) {
  if (device_.is_cpu() || !options_.pin.value_or(true)) return;
  std::vector<SourcePtr> before;
  for (const Weight* weight : weights) before.push_back(weight->source);
  std::vector<SourcePtr> sources = before;
  const std::string slower = holds->pin(device_, sources);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    // Other threads could run: the master may be another by now.
    if (weights[i]->source != before[i]) continue;
    weights[i]->source = std::move(sources[i]);
    if (weights[i]->source->pinned && weights[i]->watch) weights[i]->watch->note_pinned();
  }
  if (!slower.empty() && !std::exchange(said_slower_, true)) warn_(slower);
}

void Session::pin_replaced() {
  const std::vector<std::shared_ptr<Weight>> replaced = std::exchange(to_pin_, {});
  const std::shared_ptr<Table> table = table_;
  std::vector<Weight*> weights;
  for (const auto& weight : replaced) {
    if (weight->plan && weight->source->has_bytes) weights.push_back(weight.get());
  }
  pin(table->holds, weights);
  for (const Weight* weight : weights) {
    if (weight->way == Weight::Way::streamed && weight->plan && !closed_) {
      weight->plan->engine->replace_source(weight->id, weight->source);
    }
  }
}

void Session::call_begins() {
  ++calls_;
  DeferredRelease dropped;
  for (const auto& weight : std::exchange(residents_read_, {})) {
    if (weight->cached != nullptr) {
      const HandedOut* const record =
          HandedOut::of(*THPVariable_Unpack(weight->cached).unsafeGetTensorImpl());
      if (record != nullptr && record->may_be_written()) write_back(*weight, dropped);
    }
    refetch_if_written(*weight, dropped);
  }
}

/// All reads of a resident in one call see one state of its master. A streamed weight, and whatever is read
/// outside a call, is looked at every time.
bool Session::look_is_due(const Weight& weight) const {
  if (weight.way != Weight::Way::streamed || closed_) return false;
  return !weight.resident() || weight.looked_at != calls_ || !inside_call_of(*this);
}

void Session::look_for_silent_write(Weight& weight, DeferredRelease& dropped) {
  if (!device_.is_cpu() && capturing()) return;  // nothing can be taken to a master now
  if (inside_call_of(*this) && std::exchange(weight.looked_at, calls_) != calls_ && weight.resident()) {
    residents_read_.push_back(weight.shared_from_this());
  }
  if (weight.cached != nullptr) write_back(weight, dropped);
  if (weight.silently_written()) refetch(weight, dropped);
}

void Session::write_back(Weight& weight) {
  DeferredRelease dropped;
  write_back(weight, dropped);
}

void Session::write_back(Weight& weight, DeferredRelease& dropped) {
  bring_home(weight);
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
  // The tensor that was written is the newest there is, so it stays the one to hand out.
  weight.state.version = *written;
  weight.silently_written();  // the write back is no news
  if (!weight.plan || record->leased_from(*weight.plan->engine)) return;
  // The engine's copy is another one.
  let_companions_go(weight, dropped);
  weight.let_go(dropped);
  update_group(weight);
}

void Session::for_weights(const std::vector<at::Tensor>& masters,
                          const std::function<void(Weight&)>& use) const {
  const std::function<void(Weight&)> visit = [&](Weight& weight) {
    use(weight);
    for (const auto& [name, part] : weight.parts) visit(*part);
  };
  for (const at::Tensor& master : masters) {
    const auto& by_master = table_->by_master;
    const auto found = by_master.find(master.unsafeGetTensorImpl());
    if (found != by_master.end() && found->second->state.impl == found->first) visit(*found->second);
  }
}

void Session::expect_writes(const std::vector<at::Tensor>& masters) {
  for_weights(masters, [](const Weight& weight) {
    if (weight.watch) weight.watch->expect_writes();
  });
}

void Session::note_writes(const std::vector<at::Tensor>& masters) {
  DeferredRelease dropped;
  for_weights(masters, [&](Weight& weight) {
    if (weight.watch) weight.watch->note_write();
    refetch_if_written(weight, dropped);
  });
}

std::size_t Session::sampled_bytes() const {
  if (closed_) return 0;
  std::size_t bytes = 0;
  for (const auto& weight : table_->weights) {
    if (weight->watch && !weight->watch->exact()) bytes += weight->source->stored_bytes();
  }
  return bytes;
}

Weight& Session::weight_now(Weight& weight, PyObject* master_object, PyObject* name) {
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  if (weight.state.impl == &master) return weight;
  // Another master. It may be one that is known (a tie was made), or this one may be another's too (a tie was
  // broken); else it takes the old one's place in the plan.
  const auto& by_master = table_->by_master;
  const auto known = by_master.find(&master);
  if (known != by_master.end() && known->second->state.same_place(master)) {
    weight.unplanned_since = 0;  // it may have stood in for this one's master: such come and go
    return *known->second;
  }
  if (weight.holders > 1) return late_weight(master_object, name, weight.parameter);
  if (weight.cached != nullptr) {
    // It may be all that keeps the master alive. Releasing it may run any code, so look again.
    DeferredRelease dropped;
    weight.let_go(dropped);
    dropped.drop();
    return weight_now(weight, master_object, name);
  }
  // The weight's own master may come back, as after functional_call(): its copy on the device stays.
  if (!weight.plan || weight.master_storage.expired()) return weight;
  return late_weight(master_object, name, weight.parameter);
}

void Session::check(const py::object& module) {
  for_entries(module, [this](const Entry& entry, PyObject* master) {
    if (!entry.weight->state.same_place(*THPVariable_Unpack(master).unsafeGetTensorImpl())) outdated_ = true;
  });
}

void Session::release(const py::object& module) {
  DeferredRelease dropped;
  for_entries(module, [&](const Entry& entry, PyObject*) {
    write_back_whole(*entry.weight, dropped);
    entry.weight->forget(dropped);
    for (const auto& [name, part] : entry.weight->parts) part->forget(dropped);
  });
}

void Session::flush_module(const py::object& module) {
  DeferredRelease dropped;
  for_entries(module, [&](const Entry& entry, PyObject*) { write_back_whole(*entry.weight, dropped); });
}

void Session::flush() {
  DeferredRelease dropped;
  const std::shared_ptr<Table> table = table_;
  for (std::size_t i = 0; i < table->weights.size(); ++i) write_back(*table->weights[i], dropped);
}

void Session::write_back_whole(Weight& weight, DeferredRelease& dropped) {
  write_back(weight, dropped);
  for (const auto& [name, part] : weight.parts) write_back_whole(*part, dropped);
}

void Session::for_entries(const py::object& module,
                          const std::function<void(const Entry&, PyObject*)>& use) const {
  const py::object dict = module_dict(module.ptr());
  ModuleState* const state = module_state(module.ptr(), dict.ptr());
  if (state == nullptr) return;
  // Copies: use() may write back, which may run code that adds entries. An entry may still have what has
  // stood in for its master.
  const auto& by_master = table_->by_master;
  std::vector<std::pair<Entry, py::object>> found;
  for (const Entry& entry : *state->entries) {
    PyObject* const master = find_in(
        dict.ptr(), entry.parameter ? Names::get().parameters : Names::get().buffers, entry.name.ptr());
    if (entry.weight == nullptr || master == nullptr || !THPVariable_Check(master)) continue;
    found.emplace_back(entry, py::reinterpret_borrow<py::object>(master));
    const auto known = by_master.find(THPVariable_Unpack(master).unsafeGetTensorImpl());
    if (known != by_master.end() && known->second->state.impl == known->first)
      found.back().first.weight = known->second->shared_from_this();
  }
  for (const auto& [entry, master] : found) use(entry, master.ptr());
}

}  // namespace dynswap
