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

void Session::classify(Weight& weight, PyObject* master_object, const Mappings& mappings) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  weight.wanted = weight.exact ? master.scalar_type() : wanted_type(master, dtype_);
  weight.dressed = false;
  weight.way = way_of(weight, master_object, mappings);
  // Last, since Python code may have run: to other threads it has been the old master until now.
  weight.state = MasterState::of(*master.unsafeGetTensorImpl());
  weight.version = master.unsafeGetTensorImpl()->version_counter();
}

Weight::Way Session::way_of(Weight& weight, PyObject* master_object, const Mappings& mappings) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  weight.parts.clear();
  const bool plain = THPVariable_CheckExact(master_object);
  const bool lazy = !plain && PyObject_HasAttrString(master_object, "materialize") == 1;
  // There is nothing to move yet, or not any more (offloading gives a module masters without data between its
  // calls). An empty buffer may be about to be resized in place, as observers do.
  if (lazy || master.is_meta() || (!weight.parameter && master.sym_numel() == 0)) {
    return Weight::Way::as_is;
  }
  const bool in_place = master.device() == device_ && master.scalar_type() == weight.wanted;
  bool streams = plain;
  if (!plain) {
    const py::module_ subclasses = py::module_::import("dynswap_ext._subclasses");
    const py::object names = subclasses.attr("inner_names")(py::handle(master_object));
    if (!names.is_none()) {
      std::vector<std::pair<py::object, Weight*>> parts;
      for (const py::handle inner : names) {
        const auto name = py::reinterpret_borrow<py::object>(inner);
        const py::object tensor = py::handle(master_object).attr(name);
        Weight& part = weight_of(tensor.ptr(), weight.name + "." + py::cast<std::string>(name),
                                 /*parameter=*/false, mappings, /*exact=*/true);
        ++part.holders;
        parts.emplace_back(name, &part);
      }
      weight.parts = std::move(parts);
      return Weight::Way::wrapped;
    }
    streams = subclasses.attr("adds_attributes_only")(py::handle(master_object)).cast<bool>();
  }
  if (streams && streamable(master) && scalar_of(weight.wanted) &&
      (!in_place || mappings.find(master.const_data_ptr(), master.nbytes()))) {
    const auto source = source_of(master, weight.wanted, weight.name, mappings, page_cache_, *holds_);
    if (!in_place || source->file) {
      weight.dressed = !plain;
      weight.source = source;
      weight.silent = SilentWrites(*source);
      return Weight::Way::streamed;
    }
  }
  return in_place ? Weight::Way::as_is : Weight::Way::converted;
}

void Session::master_changed(Weight& weight, PyObject* master_object) {
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  LetGo dropped;
  if (weight.state.same_place(master) &&
      (weight.way == Weight::Way::as_is || weight.way == Weight::Way::streamed)) {
    const MasterState now = MasterState::of(master);
    const bool written = std::exchange(weight.state, now).version != now.version;
    if (weight.way == Weight::Way::as_is) return;
    written ? refetch(weight, dropped) : forget_group(weight, dropped);
    return;
  }
  by_master_[&master] = &weight;
  classify(weight, master_object, Mappings::of_this_process());
  if (weight.way != Weight::Way::streamed) return forget_group(weight, dropped);
  SourcePtr old = weight.planned ? engine_->source(weight.id) : nullptr;
  if (old && weight.source->count == old->count && weight.source->stored == old->stored &&
      weight.source->wanted == old->wanted) {
    refetch(weight, dropped);
    to_pin_.push_back(&weight);
  } else {
    forget_group(weight, dropped);
    weight.planned = false;
    outdated_ = true;
  }
  if (old && old->pinned) {
    const py::gil_scoped_release release;  // its memory may have to be unlocked, and is freed
    old.reset();
  }
}

void Session::forget_group(Weight& weight, LetGo& dropped) {
  // They share one copy. Did the session go on keeping one of them, there would be no room for the next.
  if (weight.planned) let_companions_go(weight, dropped);
  weight.forget(dropped);
}

void Session::let_companions_go(const Weight& weight, LetGo& dropped) {
  for (const WeightId id : engine_->companions(weight.id)) {
    Weight& other = *by_id_[id];
    if (&other == &weight) continue;
    // Its writes would go where nobody looks (Note [Writes without a trace]).
    if (other.still_handed_out()) {
      other.let_go(dropped);
    } else {
      other.forget(dropped);
    }
  }
}

void Session::refetch(Weight& weight, LetGo& dropped) {
  forget_group(weight, dropped);
  if (!weight.planned) return weight.note_master();
  update_group(weight);
}

void Session::update_group(Weight& weight) {
  // An optimizer's step changes all masters of a group, which then travels once.
  for (const WeightId id : engine_->companions(weight.id)) by_id_[id]->note_master();
  engine_->update_source(weight.id, weight.source);
}

void Session::pin(const std::vector<Weight*>& weights) {
  if (device_.is_cpu() || !options_.pin.value_or(true)) return;
  const std::shared_ptr<Holds> holds = holds_;
  std::vector<SourcePtr> before;
  for (const Weight* weight : weights) before.push_back(weight->source);
  std::vector<SourcePtr> sources = before;
  const std::string slower = holds->pin(device_, sources);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    // Other threads could run: the master may be another by now.
    if (weights[i]->source == before[i]) weights[i]->source = std::move(sources[i]);
  }
  if (!slower.empty() && !std::exchange(said_slower_, true)) warn_(slower);
}

void Session::pin_replaced() {
  const std::vector<Weight*> weights = std::exchange(to_pin_, {});
  pin(weights);
  for (const Weight* weight : weights) {
    if (weight->way == Weight::Way::streamed && weight->planned && !closed_) {
      engine_->replace_source(weight->id, weight->source);
    }
  }
}

void Session::look_for_silent_write(Weight& weight) {
  weight.looked_at = calls_begun();
  if (weight.cached != nullptr) write_back(weight);
  LetGo dropped;
  if (weight.silent.look(*weight.source)) refetch(weight, dropped);
}

void Session::write_back(Weight& weight) {
  bring_home(weight);
  const auto alive = weight.latest_storage.lock();
  HandedOut* const record = alive ? HandedOut::of(*alive) : nullptr;
  if (record == nullptr || !PROTECTED(living_written_back)) return;
  // Is nobody left but those who tell of each further alias? They may, while the bytes are looked at.
  const std::size_t telling = 1 + !weight.latest.expired() + (weight.cached_outside != nullptr);
  const bool last_look = record->has_untracked_alias() && alive.use_count() <= telling;
  if (last_look) record->no_untracked_alias();
  const auto written = record->write_back(last_look);
  if (!written) return;
  // The tensor that was written is the newest there is, so it stays the one to hand out.
  weight.state.version = *written;
  weight.silent.look(*weight.source);
  if (!weight.planned || record->leased()) return;
  // The engine's copy is another one.
  LetGo dropped;
  let_companions_go(weight, dropped);
  weight.let_go(dropped);
  update_group(weight);
}

Weight& Session::weight_now(Weight& weight, PyObject* master_object, PyObject* name) {
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  if (weight.state.impl == &master) return weight;
  // Another master. It may be one that is known (a tie was made), or this one may be another's too (a tie was
  // broken); else it takes the old one's place in the plan.
  const auto known = by_master_.find(&master);
  if (known != by_master_.end() && known->second->state.same_place(master)) return *known->second;
  return weight.holders > 1 ? late_weight(master_object, name, weight.parameter) : weight;
}

void Session::check(const py::object& module) {
  for_entries(module, [this](const Entry& entry, PyObject* master) {
    if (!entry.weight->state.same_place(*THPVariable_Unpack(master).unsafeGetTensorImpl())) outdated_ = true;
  });
}

void Session::release(const py::object& module) {
  for_entries(module, [this](const Entry& entry, PyObject*) {
    write_back_whole(*entry.weight);
    LetGo dropped;
    entry.weight->forget(dropped);
    for (const auto& [name, part] : entry.weight->parts) part->forget(dropped);
  });
}

void Session::flush_module(const py::object& module) {
  for_entries(module, [this](const Entry& entry, PyObject*) { write_back_whole(*entry.weight); });
}

void Session::flush() {
  for (const auto& weight : weights_) write_back(*weight);
}

void Session::write_back_whole(Weight& weight) {
  write_back(weight);
  for (const auto& [name, part] : weight.parts) write_back_whole(*part);
}

void Session::for_entries(const py::object& module,
                          const std::function<void(const Entry&, PyObject*)>& use) const {
  const py::object dict = module_dict(module.ptr());
  ModuleState* const state = module_state(module.ptr(), dict.ptr());
  if (state == nullptr) return;
  for (const Entry& entry : *state->entries) {
    PyObject* const master = find_in(
        dict.ptr(), entry.parameter ? Names::get().parameters : Names::get().buffers, entry.name.ptr());
    if (entry.weight != nullptr && master != nullptr && THPVariable_Check(master)) use(entry, master);
  }
}

}  // namespace dynswap
