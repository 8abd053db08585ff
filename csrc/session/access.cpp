// Session: what an access to a weight hands out.
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "accelerator/plain_torch.h"
#include "accelerator/torch_stream.h"
#include "core/protection.h"
#include "session/calls.h"
#include "session/captures.h"
#include "session/module_state.h"
#include "session/saved_hooks.h"
#include "session/session.h"
#include "tensor/autograd_state.h"
#include "tensor/fetch_backward.h"
#include "tensor/handed_out.h"
#include "tensor/master_memory.h"
#include "tensor/written_buffers.h"

namespace dynswap {

namespace {

/// Buffers up to this size are handed out as copies of their own while the module trains, and compared
/// when they are let go: F.batch_norm writes its statistics without bumping their version.
constexpr std::size_t kSmallBuffer = 1u << 20;

void mark_as_parameter(PyObject* tensor) {
  // What makes isinstance(w, nn.Parameter) true for a tensor that is not a leaf.
  static PyObject* const flag = PyUnicode_InternFromString("_is_param");
  // Classes of the user's may have a `__setattr__`; torch's own has none that matters here.
  const int failed = THPVariable_CheckExact(tensor) ? PyDict_SetItem(module_dict(tensor).ptr(), flag, Py_True)
                                                    : PyObject_SetAttr(tensor, flag, Py_True);
  if (failed != 0) throw py::error_already_set();
}

bool in_functorch_transform() noexcept {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         included.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

void set_item(PyObject* dict, PyObject* key, PyObject* value) {
  if (PyDict_SetItem(dict, key, value) != 0) throw py::error_already_set();
}

/// What `proxy_for` of dynswap_ext/_swap/parameter_proxy.py makes of a tensor of HandedOut::make(), under the
/// same names, in a fifth of the time.
PyObject* proxy_of(PyObject* tensor, PyObject* master, bool parameter, PyObject* proxy_class) {
  static PyObject* const alias_name = PyUnicode_InternFromString("_dynswap_alias");
  static PyObject* const master_name = PyUnicode_InternFromString("_dynswap_master");
  static PyObject* const tensor_name = PyUnicode_InternFromString("_dynswap_tensor");
  const py::object attributes = module_dict(tensor);
  if (PyObject* const known = PyDict_GetItemWithError(attributes.ptr(), alias_name)) {
    auto alive = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(known));
    if (!alive) throw py::error_already_set();
    if (!alive.is_none()) return alive.release().ptr();
  }
  const c10::InferenceMode ordinary(false);
  auto proxy = py::reinterpret_steal<py::object>(THPVariable_Wrap(alias_of(THPVariable_Unpack(tensor))));
  if (!proxy) throw py::error_already_set();
  const py::object own = module_dict(proxy.ptr());
  if (parameter) mark_as_parameter(proxy.ptr());
  set_item(own.ptr(), master_name, master);
  set_item(own.ptr(), tensor_name, tensor);
  set_class(proxy.ptr(), reinterpret_cast<PyTypeObject*>(proxy_class));
  const auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(proxy.ptr(), nullptr));
  if (!reference) throw py::error_already_set();
  set_item(attributes.ptr(), alias_name, reference.ptr());
  return proxy.release().ptr();
}

}  // namespace

PyObject* Session::access_unchanged(const Weight& weight, PyObject* master, bool inside) const {
  if (look_is_due(weight)) return nullptr;
  return cached_tensor(weight, master, inside);
}

PyObject* Session::cached_tensor(const Weight& weight, PyObject* master, bool inside) const {
  const c10::TensorImpl& impl = *THPVariable_Unpack(master).unsafeGetTensorImpl();
  if (weight.path == Weight::AccessPath::as_is) {
    const bool same = weight.state.same_place(impl) && weight.state.same_layout(impl);
    return same ? Py_NewRef(master) : nullptr;
  }
  if (weight.has_subclass || recording_) return nullptr;
  if (abandoned_ && !in_child_) return nullptr;
  PyObject* const cached = inside ? weight.cached : weight.cached_outside;
  if (cached == nullptr) return nullptr;
  if (PROTECTED(changed_master_seen) && !weight.state.is_of(impl)) return nullptr;
  if (!options_.device.is_cpu()) {
    if (PROTECTED(resident_per_stream) && stream_id() != weight.cached_stream) return nullptr;
    if (!captured_ && capturing()) return nullptr;  // plain_access() takes note
  }
  return Py_NewRef(cached);
}

/// Note [What is read outside a forward may be written by anybody]: NumPy, DLPack and views can write to
/// bytes in RAM and bump no version. So those bytes are watched as a master's are. Not what a forward reads:
/// to have each weight of each pass watched would cost more than to fetch it.
PyObject* Session::seen_from_outside(Weight& weight, PyObject* master, PyObject* handed_out) {
  const auto inside = py::reinterpret_steal<py::object>(handed_out);
  if (inside.ptr() == master) return Py_NewRef(master);
  HandedOut* const record = HandedOut::of(*THPVariable_Unpack(inside.ptr()).unsafeGetTensorImpl());
  if (record != nullptr) record->watch_bytes();
  const bool plain = THPVariable_CheckExact(inside.ptr()) && !in_functorch_transform();
  PyObject* const alias = plain ? proxy_of(inside.ptr(), master, weight.parameter, hooks_.proxy_class.ptr())
                                : Py_NewRef(inside.ptr());
  const at::Tensor& used = THPVariable_Unpack(inside.ptr());
  const at::Tensor& seen = THPVariable_Unpack(alias);
  if (used.requires_grad() && !seen.requires_grad()) {
    const GradientTarget to = gradient_target_of_all_uses(used);
    // See Note [Nodes that are read outside a forward].
    if (to.node && to.node->keep_for_outside_read(seen)) read_outside_.keep(to.node);
    torch::autograd::impl::set_gradient_edge(seen, to.edge);
  }
  if (weight.cached == inside.ptr() && weight.cached != alias) {
    Py_XSETREF(weight.cached_outside, Py_NewRef(alias));
  }
  return alias;
}

PyObject* Session::access(Weight& weight, PyObject* master, bool training, bool inside) {
  if (abandoned_ && !in_child_) begin_in_child();
  if (inside) RefetchInBackward::stand_over_others();
  if (weight.overlaps()) {
    DeferredRelease dropped;
    write_back_overlapping(weight, dropped);
  }
  GradientTarget to;
  if (weight.path == Weight::AccessPath::streamed && weight.cached == nullptr &&
      THPVariable_Unpack(master).requires_grad()) {
    const std::shared_ptr<Weight> alive = weight.shared_from_this();
    to = gradient_target_of(THPVariable_Unpack(master));  // others may run, so it comes before settle()
  }
  if (weight.superseded || !settle(weight, master)) return convert(weight, master);
  // checkpoint() calls a part of a forward again in a backward, and expects the same operations.
  if (sliced(weight) && (inside || torch::autograd::get_current_graph_task_id() != -1)) {
    return hooks_
        .slices_of(py::handle(master), py::cast(shared_from_this()), py::cast(options_.device),
                   py::cast(weight.wanted))
        .release()
        .ptr();
  }
  if (!training) {
    if (PyObject* const unchanged = cached_tensor(weight, master, inside)) return unchanged;
  }
  PyObject* handed_out = plain_access(weight, master, training, inside, std::move(to));
  if (weight.has_subclass && handed_out != master)
    handed_out = with_class_of_master(weight, master, handed_out);
  return inside ? handed_out : seen_from_outside(weight, master, handed_out);
}

PyObject* Session::plain_access(Weight& weight, PyObject* master_object, bool training, bool inside,
                                GradientTarget to) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  if (weight.path == Weight::AccessPath::as_is) return Py_NewRef(master_object);
  if (weight.path == Weight::AccessPath::wrapped) {
    const bool in_graph = master.requires_grad() && at::GradMode::is_enabled();
    // A graph has the wrapper's own `.to()` in it (Note [Subclasses are taken apart]).
    return in_graph ? convert(weight, master_object) : rebuild_wrapper(weight, master_object);
  }
  if (weight.path == Weight::AccessPath::converted) return convert(weight, master_object);
  const auto path = weight.path;
  for (bool ask = may_have_tangents(); ask || (master.requires_grad() && !to.edge.is_valid());) {
    const std::shared_ptr<Weight> alive = weight.shared_from_this();
    to = gradient_target_of(master);
    if (std::exchange(ask, false) && has_tangent(master)) return convert(weight, master_object);
    // Others may have run, and changed what was looked at.
    if (weight.superseded || !settle(weight, master_object)) return convert(weight, master_object);
    if (weight.path != path) return plain_access(weight, master_object, training, inside, to);
  }
  if (!master.requires_grad()) to = {};  // it was frozen meanwhile
  if (closed_) return convert(weight, master_object);

  const auto bytes = static_cast<std::size_t>(master.numel()) * at::elementSize(weight.wanted);
  const bool small_buffer = PROTECTED(private_copies) && !weight.parameter && bytes <= kSmallBuffer;
  const bool watched = small_buffer && training && !master.requires_grad();
  if ((weight.cached == nullptr || !captured_) && capturing()) {
    if (weight.cached == nullptr && PROTECTED(capture_refused)) {
      if (watched) refuse_capture_of_written(options_.device, weight.name);
      const bool held =
          weight.plan && weight.plan->gives_way && weight.plan->engine->keep_from_giving_way(weight.id);
      if (!held) refuse_capture(options_.device, weight.name, weight.resident());
    }
    captured_ = true;
  }
  DeferredRelease dropped;
  if (const at::Tensor tensor = still_handed_out(weight, master, watched, to); tensor.defined()) {
    HandedOut* const record = HandedOut::of(*tensor.unsafeGetTensorImpl());
    if (!record->watched() || !inside_call()) write_back(weight, dropped);
    if (small_buffer && training) watch(tensor);
    return hand_out_again(weight, tensor, master, to);
  }
  if (watched || !weight.plan) {
    write_back(weight, dropped);  // of a copy that is held by a graph alone
    if (weight.path == Weight::AccessPath::streamed && !weight.plan && inside_call_of(*this))
      note_unplanned(weight);
    return hand_out_private(weight, master, watched, to);
  }
  return hand_out(weight, master_object, inside, to);
}

PyObject* Session::hand_out_private(Weight& weight, const at::Tensor& master, bool watched,
                                    const GradientTarget& to) {
  const at::Tensor copy = HandedOut::make_private({weak_from_this(), weight.shared_from_this()}, master,
                                                  options_.device, count_whole(weight));
  if (watched) watch(copy);
  if (to.edge.is_valid()) connect_to_master(copy, master, to, weight.watch, weight.gradient);
  if (!weight.plan) {
    ++counters_.copies;
    counters_.bytes_moved += master.nbytes();
    counters_.bytes_decoded += master.nbytes();
  }
  remember(weight, copy);
  return wrap(weight, copy);
}

at::Tensor Session::still_handed_out(Weight& weight, const at::Tensor& master, bool watched,
                                     const GradientTarget& to) {
  if (auto alive = weight.latest.lock(); alive && HandedOut::of(*alive) != nullptr)
    return at::Tensor::wrap_tensor_impl(std::move(alive));
  at::Tensor tensor;
  auto storage = weight.latest_storage.lock();
  HandedOut* const record = storage ? HandedOut::of(*storage) : nullptr;
  if (record != nullptr) {
    tensor = HandedOut::again(std::move(storage), master);
  } else if (watched) {
    auto kept = taken_back(weight);
    if (kept && weight.state.same_bytes(*kept->master().unsafeGetTensorImpl()) && kept->master_unchanged()) {
      kept->belong_to({weak_from_this(), weight.shared_from_this()});
      tensor = HandedOut::again(std::move(kept), master);
    }
  }
  if (!tensor.defined()) return tensor;
  if (to.edge.is_valid()) connect_to_master(tensor, master, to, weight.watch, weight.gradient);
  remember(weight, tensor);
  return tensor;
}

void Session::release_idle_nodes() {
  DeferredRelease dropped;
  read_outside_.release_idle(dropped.nodes);
}

void Session::watch(const at::Tensor& tensor) {
  if (inside_call()) {
    write_back_after_call(tensor);
  } else {
    HandedOut::of(*tensor.unsafeGetTensorImpl())->watch();
  }
}

PyObject* Session::hand_out_again(Weight& weight, const at::Tensor& tensor, const at::Tensor& master,
                                  const GradientTarget& to) {
  HandedOut* const record = HandedOut::of(*tensor.unsafeGetTensorImpl());
  const Stream consumer = current_stream(options_.device);
  const std::shared_ptr<const Plan> plan = weight.plan;
  try {
    const py::gil_scoped_release release;
    if (PROTECTED(second_stream_told)) record->use_here();
    if (recording_ && plan) plan->engine->note_use(weight.id, consumer);
  } catch (const ClosedError&) {
    // A companion was on its way to the same copy: Note [One outdated weight of a group].
    return hand_out_private(weight, master, /*watched=*/false, to);  // Note [A plan takes another's place]
  }
  if (weight.cached != nullptr && THPVariable_Unpack(weight.cached).is_same(tensor)) {
    weight.cached_stream = stream_id();
  }
  return wrap(weight, tensor);
}

PyObject* Session::hand_out(Weight& weight, PyObject* master_object, bool inside, const GradientTarget& to) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  const Stream consumer = current_stream(options_.device);
  const std::uint64_t generation = weight.generation;
  auto record = HandedOut::of_weight({weak_from_this(), weight.shared_from_this()}, master, options_.device);
  const std::shared_ptr<const Plan> plan = weight.plan;
  const bool stays = weight.resident();
  const auto earlier = weight.latest_storage.lock();  // it may be held, by a view
  const bool in_order = inside_call();
  Lease lease = plan->engine->acquire_present(weight.id, consumer, in_order);
  const bool others_ran = !lease;
  if (others_ran) {
    try {
      const py::gil_scoped_release release;
      lease = plan->engine->acquire(
          weight.id, consumer,
          {.in_order = in_order, .after_consumer = captured_ && stays && PROTECTED(after_replays)});
    } catch (const ClosedError&) {
      return hand_out_private(weight, master, /*watched=*/false, to);  // Note [A plan takes another's place]
    }
  }
  if (others_ran && master.requires_grad() != to.edge.is_valid())  // it was frozen or thawed meanwhile
    return plain_access(weight, master_object, /*training=*/false, inside, {});
  const bool overflows = lease.overflows();
  const at::Tensor tensor =
      HandedOut::make(std::move(record), std::move(lease), earlier ? HandedOut::of(*earlier) : nullptr,
                      /*watched=*/!inside);
  // Other threads may have run. If the master has changed, only this access sees the old one. If another
  // thread has got the weight, this one hands out the same tensor.
  const bool outdated = weight.generation != generation;
  if (others_ran && !outdated) {
    if (const at::Tensor other = still_handed_out(weight, master, /*watched=*/false, to); other.defined())
      return hand_out_again(weight, other, master, to);
  }
  if (to.edge.is_valid()) connect_to_master(tensor, master, to, weight.watch, weight.gradient);
  PyObject* const object = wrap(weight, tensor);
  if (outdated) return object;
  remember(weight, tensor);
  // A copy outside the budget is not cached: it would stay there. Nor is one that may give way.
  const bool for_good = stays && !plan->gives_way;
  if (for_good && weight.cached == nullptr && !overflows && !may_refer_back(master_object)) {
    weight.cached = Py_NewRef(object);
    weight.cached_stream = stream_id();
  }
  return object;
}

void Session::remember(Weight& weight, const at::Tensor& handed_out) {
  weight.remember(handed_out);
  constexpr std::size_t kMany = 4;
  if (recent_.size() >= kMany)
    std::erase_if(recent_, [](const std::shared_ptr<Weight>& other) { return other->drop_if_dead(); });
  // A graph, or residents, may keep as many alive: those are not looked at again.
  if (recent_.size() >= kMany) recent_.clear();
  recent_.push_back(weight.shared_from_this());
}

at::Tensor Session::fetch_again(Weight& weight, const at::Tensor& master, std::thread::id reader) {
  if (abandoned_ && !in_child_) begin_in_child();
  const bool served = weight.path == Weight::AccessPath::streamed && weight.plan && !closed_;
  weight.follow_version();
  // Another master may have taken its place since.
  if (served && weight.state.same_bytes(*master.unsafeGetTensorImpl())) {
    DeferredRelease dropped;
    const bool plain = !weight.resident() && weight.became_plain();
    if (plain) follow_plain(weight, *weight.content->with_bytes(), dropped);
    if (plain || (!weight.resident() && weight.silently_written())) drop_outdated_copy(weight, dropped);
  }
  if (served && weight.plan && weight.state.same_bytes(*master.unsafeGetTensorImpl())) {
    refuse_capture(options_.device, weight.name, weight.resident());
    const Stream consumer = current_stream(options_.device);
    auto record =
        HandedOut::of_weight({weak_from_this(), weight.shared_from_this()}, master, options_.device);
    const std::shared_ptr<const Plan> plan = weight.plan;
    try {
      Lease lease;
      {
        const py::gil_scoped_release release;
        lease = plan->engine->acquire(weight.id, consumer, {.thread = reader});
      }
      return HandedOut::make(std::move(record), std::move(lease));
    } catch (const ClosedError&) {
      // See Note [A plan takes another's place]
    }
  }
  return HandedOut::make_private({weak_from_this(), weight.shared_from_this()}, master, options_.device,
                                 count_whole(weight));
}

py::object Session::as_object(const at::Tensor& tensor, bool parameter) {
  auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  if (!object) throw py::error_already_set();
  if (parameter) mark_as_parameter(object.ptr());
  return object;
}

PyObject* Session::wrap(const Weight& weight, const at::Tensor& tensor) {
  return as_object(tensor, weight.parameter).release().ptr();
}

PyObject* Session::rebuild_wrapper(Weight& weight, PyObject* master) {
  py::dict inner;
  const std::vector<std::pair<py::object, std::shared_ptr<Weight>>> parts = weight.parts;
  for (const auto& [name, known] : parts) {
    const py::object tensor = py::handle(master).attr(name);
    const auto part = weight_now(*known, tensor.ptr(), name.ptr()).shared_from_this();
    if (part != known) {
      for (auto& [other_name, other] : weight.parts) {
        if (other != known || !other_name.is(name)) continue;
        --other->holders;
        other = part;
        ++other->holders;
      }
    }
    inner[name] =
        py::reinterpret_steal<py::object>(access(*part, tensor.ptr(), /*training=*/false, /*inside=*/true));
  }
  const auto [made, is_new] =
      hooks_
          .rebuild_subclass(py::handle(master), inner, py::cast(options_.device),
                            py::cast(wanted_type(THPVariable_Unpack(master), options_.dtype, weight.casting)))
          .cast<std::pair<py::object, bool>>();
  if (is_new) {
    // What is written on the wrapper is written by its class, below the part of torch that bumps versions: of
    // all that are involved, the wrapper's own is bumped.
    const c10::VariableVersion& version =
        THPVariable_Unpack(made.ptr()).unsafeGetTensorImpl()->version_counter();
    for (const auto& [name, tensor] : inner) {
      HandedOut* const record = HandedOut::of(*THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl());
      if (record != nullptr) record->note_version_of_alias(version);
    }
  }
  if (weight.parameter) mark_as_parameter(made.ptr());
  return Py_NewRef(made.ptr());
}

PyObject* Session::with_class_of_master(const Weight& weight, PyObject* master, PyObject* handed_out) const {
  const auto plain = py::reinterpret_steal<py::object>(handed_out);
  if (!THPVariable_CheckExact(plain.ptr())) return Py_NewRef(plain.ptr());  // it was converted
  const py::tuple made =
      hooks_.rebuild_subclass(py::handle(master), plain, py::cast(options_.device), py::cast(weight.wanted));
  const py::object rebuilt = made[0];
  if (weight.parameter) mark_as_parameter(rebuilt.ptr());
  return Py_NewRef(rebuilt.ptr());
}

py::object copied_by_torch(const py::object& master, const at::Device& device, at::ScalarType dtype,
                           bool copy) {
  const KeptLocked kept(THPVariable_Unpack(master.ptr()), device);
  return master.attr("to")(py::cast(device), py::cast(dtype), py::arg("copy") = copy);
}

PyObject* Session::convert(const Weight& weight, PyObject* master) const {
  if (weight.mapped && copyable(THPVariable_Unpack(master))) {
    const PlainTorch guard;
    static_cast<void>(read_master(THPVariable_Unpack(master), weight.name));  // it is there
  }
  const at::ScalarType wanted = wanted_type(THPVariable_Unpack(master), options_.dtype, weight.casting);
  const KeptLocked kept(THPVariable_Unpack(master), options_.device);
  const py::object moved = hooks_.convert(py::handle(master), py::cast(options_.device), py::cast(wanted));
  if (weight.parameter && moved.ptr() != master) mark_as_parameter(moved.ptr());
  return Py_NewRef(moved.ptr());
}

}  // namespace dynswap
