// Session: a plan, or a session, takes another's place.
#include <utility>

#include "accelerator/torch_stream.h"
#include "session/draft.h"
#include "tensor/handed_out.h"

namespace dynswap {

namespace {

/// What was handed out of `earlier` is handed out again: who still has it, and writes to it, writes to the
/// master of both.
void hand_on(Weight& earlier, Weight& weight, const std::shared_ptr<Session>& session) {
  weight.number = earlier.number;
  const auto alive = earlier.latest_storage.lock();
  HandedOut* const record = alive ? HandedOut::of(*alive) : nullptr;
  if (record == nullptr || !weight.moves_bytes() || !earlier.still_handed_out()) return;
  weight.note_master();  // it may have been written since it was drafted
  // Frozen or thawed since: another tensor of the storage is handed out.
  if (weight.state.requires_grad == earlier.state.requires_grad) weight.latest = earlier.latest;
  weight.latest_storage = earlier.latest_storage;
  record->belong_to({session, weight.shared_from_this()});
}

}  // namespace

/// Whether the bytes of `earlier` on the device are those of `weight`, if the master is unchanged.
bool same_device_bytes(const Weight& earlier, const Weight& weight) {
  constexpr auto streamed = Weight::AccessPath::streamed;
  return earlier.path == streamed && weight.path == streamed && weight.state.same_elements(earlier.state) &&
         weight.source->same_shape(*earlier.source);
}

/// Gives every module its new weights. Does not release the GIL before that.
void Session::take_over(Draft& draft) {
  DeferredRelease dropped;
  draft.before = std::exchange(table_, draft.table);
  for (Draft::Module& module : draft.modules) {
    for (Entry& entry : *reinterpret_cast<ModuleState*>(module.state.ptr())->entries) {
      entry.bind(nullptr);  // an entry added meanwhile gets its weight at its next access
      for (const Entry& drafted : module.entries) {
        if (drafted.name.is(entry.name) && drafted.parameter == entry.parameter) entry.bind(drafted.weight);
      }
    }
  }
  draft.unchanged.resize(draft.plan->weights.size());
  for (const auto& weight : draft.before->weights()) {
    Weight* const successor = table_->find(weight->state.impl);
    if (successor != nullptr) successor->take_nodes(*weight);
    if (successor != nullptr && successor->state.same_elements(weight->state)) {
      hand_on(*weight, *successor, shared_from_this());
      // Graphs that were captured read residents, and hold no lease.
      if (!captured_ && weight->plan == plan_ && same_device_bytes(*weight, *successor) &&
          weight->resident() && weight->master_unchanged())
        draft.unchanged[successor->id] = {weight->id, successor->state.version, successor->writes_seen};
    }
    weight->superseded = true;
    weight->plan = nullptr;
    weight->forget(dropped);
  }
  residents_read_.clear();
  recent_.clear();
  to_pin_.clear();
}

/// Goes on with what was handed out of these modules' weights, which were `earlier`'s. See Note [An install
/// takes another's place]. Does not release the GIL.
void Session::take_weights(Session& earlier, const std::vector<ModuleState*>& states,
                           DeferredRelease& dropped) {
  std::vector<std::shared_ptr<Weight>> left;
  for (const ModuleState* const state : states) {
    for (Entry& entry : *state->entries) {
      if (entry.weight != nullptr) left.push_back(entry.weight);
      entry.bind(nullptr);
    }
  }
  for (const auto& weight : left) {
    if (weight->holders == 0 && !weight->superseded) take_weight(earlier, *weight, dropped);
  }
  if (states.size() < earlier.modules_) return;
  earlier.replaced_ = true;
  earlier.successor_ = weak_from_this();
  read_outside_.take(earlier.read_outside_);
}

void Session::take_weight(Session& earlier, Weight& weight, DeferredRelease& dropped) {
  Weight* const successor = table_->find(weight.state.impl);
  if (successor != nullptr && earlier.options_.device == options_.device &&
      successor->wanted == weight.wanted && successor->path == weight.path &&
      successor->state.same_elements(weight.state)) {
    successor->take_nodes(weight);
    hand_on(weight, *successor, shared_from_this());
  } else {
    weight.release_nodes(dropped);
  }
  for (const auto& [name, part] : weight.parts) {
    if (--part->holders == 0) take_weight(earlier, *part, dropped);
    ++part->holders;  // until the weight goes
  }
  earlier.outdated_ = earlier.outdated_ || weight.plan != nullptr;
  weight.superseded = true;
  weight.plan = nullptr;
  weight.forget(dropped);
}

/// Frees the old plan's memory and allocates the new one's; releases the GIL. Throws OutOfMemory, after which
/// each access copies.
void Session::carry_out(const Draft& draft) {
  const std::shared_ptr<const Plan> old = plan_;
  Engine& engine = *draft.plan->engine;
  if (old->engine != draft.plan->engine) {
    std::vector<std::optional<WeightId>> ids;
    for (const auto& weight : draft.unchanged)
      ids.push_back(weight ? std::optional(weight->earlier) : std::nullopt);
    engine.inherit(*old->engine, ids);
    {
      const py::gil_scoped_release release;
      old->engine->close();
    }
    draft.before->drop_bytes();
  }
  try {
    const py::gil_scoped_release release;
    if (engine.residents_give_way()) release_kept_memory(options_.device);
    engine.plan();
  } catch (...) {
    outdated_ = true;  // there may be room another time
    captured_ = false;
    throw;
  }
  if (closed_) {
    const py::gil_scoped_release release;
    return engine.close();
  }
  if (engine.residents_give_way())
    draft.plan->gives_way = std::make_unique<GivesWay>(options_.device, draft.plan->engine);
  if (old->engine != draft.plan->engine) counters_.add_counters(old->engine->stats());
  plan_ = draft.plan;
  if (offload_ && plan_->budget.activations) offload_->set_limit(*plan_->budget.activations);
  streams_any_ = false;
  for (const auto& [weight, unit] : draft.streamed.first) {
    // Masters may have changed while other threads could run.
    const SourcePtr known = engine.source(weight->id);
    if (weight->path != Weight::AccessPath::streamed || !weight->source->same_shape(*known)) {
      outdated_ = true;
      continue;
    }
    bool changed = weight->source != known;
    if (!draft.unchanged.empty() && draft.unchanged[weight->id]) {
      const Draft::Unchanged& then = *draft.unchanged[weight->id];
      changed = changed || weight->state.version != then.version || weight->writes_seen != then.writes;
    }
    if (changed) engine.update_source(weight->id, weight->source);
    weight->plan = plan_;
    streams_any_ = streams_any_ || streams(*weight);
  }
  tell_captured();
}

/// Frees the old plan's memory, and takes none for the new one.
void Session::put_down(const Draft& draft) {
  const std::shared_ptr<const Plan> old = std::exchange(plan_, draft.plan);
  {
    const py::gil_scoped_release release;
    old->engine->close();
  }
  draft.before->drop_bytes();
  counters_.add_counters(old->engine->stats());
  streams_any_ = false;
  outdated_ = true;
  tell_captured();
}

void Session::tell_captured() {
  if (!std::exchange(captured_, false)) return;
  hooks_.warn(
      "a new plan put weights elsewhere on the device: CUDA graphs that were captured with this model are "
      "not valid any more; capture them again");
}

}  // namespace dynswap
