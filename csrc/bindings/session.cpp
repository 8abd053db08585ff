#include "bindings/session.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <unordered_set>
#include <utility>

#include "bindings/backends.h"
#include "bindings/fetch_backward.h"
#include "bindings/glue.h"
#include "bindings/handed_out.h"

namespace dynswap {

namespace {

/// Buffers up to this size are handed out as copies of their own while the module trains, and compared
/// when they are let go: F.batch_norm writes its statistics without bumping their version.
constexpr std::size_t kSmallBuffer = 1u << 20;

/// LOCK: the GIL.
std::unordered_set<Session*>& sessions() {
  static auto* const all = new std::unordered_set<Session*>();
  return *all;
}

void mark_as_parameter(PyObject* tensor) {
  // What makes isinstance(w, nn.Parameter) true for a tensor that is not a leaf.
  static PyObject* const flag = PyUnicode_InternFromString("_is_param");
  if (PyObject_SetAttr(tensor, flag, Py_True) != 0) throw py::error_already_set();
}

}  // namespace

Session::Session(const at::Device& device, std::optional<at::ScalarType> dtype, SessionOptions options,
                 py::object warn)
    : device_(device), dtype_(dtype), options_(std::move(options)), warn_(std::move(warn)) {
  auto backend = make_backend(device_, options_.backend);
  backend_ = backend->name();
  EngineOptions engine;
  engine.budget = options_.budget.value_or(0);
  engine.prefetch = options_.prefetch;
  engine.strict_budget = options_.strict_budget;
  engine_ = std::make_shared<Engine>(std::move(backend), engine, [this](const std::string& message) {
    const py::gil_scoped_acquire gil;
    warn_(message);
  });
  sessions().insert(this);
}

Session::~Session() {
  sessions().erase(this);
  close();
}

void Session::module_gone() {
  if (--modules_ == 0) close();
}

void Session::close() {
  if (std::exchange(closed_, true)) return;
  for (const auto& weight : weights_) weight->forget();
  if (abandoned_) return;
  const py::gil_scoped_release release;
  engine_->close();
  pinned_.reset();
}

void Session::close_all() {
  const std::unordered_set<Session*> all = sessions();
  for (Session* session : all) session->close();
}

void Session::abandon_all_after_fork() {
  for (Session* session : sessions()) {
    session->abandoned_ = true;
    session->engine_->abandon();
  }
}

Stats Session::stats() const {
  Stats stats = engine_->stats();
  // What the session keeps for itself is not handed out.
  for (const auto& weight : weights_) {
    if (weight->cached != nullptr && Py_REFCNT(weight->cached) == 1 && stats.live_leases > 0)
      --stats.live_leases;
  }
  return stats;
}

void Session::reset_stats() { engine_->reset_counters(); }

c10::StreamId Session::stream_id() const {
  if (device_.is_cpu()) return 0;
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).id();
}

// -------------------------------------------------------------------------------------------- access

PyObject* Session::access_unchanged(Weight& weight, PyObject* master) noexcept {
  const c10::TensorImpl& impl = *THPVariable_Unpack(master).unsafeGetTensorImpl();
  if (weight.way == Weight::Way::as_is) return weight.state.same_place(impl) ? Py_NewRef(master) : nullptr;
  if (weight.cached == nullptr || !(MasterState::of(impl) == weight.state)) return nullptr;
  const Weight* const last = std::exchange(last_, &weight);
  if (&weight == anchor_ && last != &weight) return nullptr;
  if (!device_.is_cpu() && stream_id() != weight.cached_stream) return nullptr;
  Py_INCREF(weight.cached);
  return weight.cached;
}

PyObject* Session::access(Weight& weight, PyObject* master_object, bool training) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  if (weight.way != Weight::Way::converted || weight.planned) {
    if (!(MasterState::of(*master.unsafeGetTensorImpl()) == weight.state))
      master_changed(weight, master_object);
  }
  if (weight.way == Weight::Way::as_is) return Py_NewRef(master_object);
  if (weight.way == Weight::Way::converted || abandoned_ || closed_) return convert(weight, master_object);

  const bool small_buffer = !weight.parameter && weight.source->wanted_bytes() <= kSmallBuffer;
  last_ = &weight;
  if (anchor_ == nullptr) anchor_ = &weight;
  if (anchor_ == &weight) look_for_silent_writes();
  if (!engine_->resident(weight.id) && weight.silent.look(*weight.source)) refetch(weight);

  if (const auto alive = weight.latest.lock()) {
    if (HandedOut* record = HandedOut::of(*alive)) {
      const at::Tensor tensor = at::Tensor::wrap_tensor_impl(alive);
      write_back(weight);
      if (small_buffer && training) record->compare_bytes();
      const Stream consumer = current_stream(device_);
      {
        const py::gil_scoped_release release;
        record->use_on(consumer);
      }
      if (weight.cached != nullptr) weight.cached_stream = stream_id();
      return wrap(weight, tensor);
    }
  }
  if (small_buffer && training && !master.requires_grad()) {
    const at::Tensor copy = HandedOut::make_private(master, weight.wanted, device_);
    HandedOut::of(*copy.unsafeGetTensorImpl())->compare_bytes();
    weight.latest = c10::weak_intrusive_ptr<c10::TensorImpl>(copy.getIntrusivePtr());
    return wrap(weight, copy);
  }
  return hand_out(weight, master);
}

PyObject* Session::hand_out(Weight& weight, const at::Tensor& master) {
  const Stream consumer = current_stream(device_);
  const std::uint64_t forgotten = weight.forgotten;
  Lease lease;
  {
    const py::gil_scoped_release release;
    lease = engine_->acquire(weight.id, consumer);
  }
  const at::Tensor tensor = HandedOut::make(std::move(lease), master, weight.wanted, device_);
  if (master.requires_grad()) FetchBackward::connect(tensor, master);
  PyObject* const object = wrap(weight, tensor);
  // The master may have changed while other threads could run: then this is the last that sees the old one.
  if (weight.forgotten != forgotten) return object;
  weight.latest = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
  if (engine_->resident(weight.id) && weight.cached == nullptr) {
    weight.cached = Py_NewRef(object);
    weight.cached_stream = stream_id();
  }
  return object;
}

PyObject* Session::wrap(const Weight& weight, const at::Tensor& tensor) {
  py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  if (!object) throw py::error_already_set();
  if (weight.parameter) mark_as_parameter(object.ptr());
  return object.release().ptr();
}

PyObject* Session::convert(const Weight& weight, PyObject* master) const {
  const at::ScalarType wanted = wanted_type(THPVariable_Unpack(master), dtype_);
  const py::object moved = py::handle(master).attr("to")(py::cast(device_), py::cast(wanted));
  if (weight.parameter && moved.ptr() != master) mark_as_parameter(moved.ptr());
  return Py_NewRef(moved.ptr());
}

// ------------------------------------------------------------------------------- masters are the truth

void Session::classify(Weight& weight, PyObject* master_object, const Mappings& mappings) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  weight.state = MasterState::of(*master.unsafeGetTensorImpl());
  weight.wanted = wanted_type(master, dtype_);
  const bool plain = THPVariable_CheckExact(master_object);
  if (!plain && PyObject_HasAttrString(master_object, "materialize") == 1) {
    weight.way = Weight::Way::as_is;  // of a lazy module: there is nothing to move yet
    return;
  }
  const bool in_place = master.device() == device_ && master.scalar_type() == weight.wanted;
  if (plain && streamable(master) && scalar_of(weight.wanted) &&
      (!in_place || mappings.find(master.const_data_ptr(), master.nbytes()))) {
    const auto source = source_of(master, weight.wanted, weight.name, mappings);
    if (!in_place || source->file) {
      weight.way = Weight::Way::streamed;
      weight.source = source;
      weight.silent = SilentWrites(*source);
      return;
    }
  }
  weight.way = in_place ? Weight::Way::as_is : Weight::Way::converted;
}

void Session::master_changed(Weight& weight, PyObject* master_object) {
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  const MasterState now = MasterState::of(master);
  const bool same_place = weight.state.same_place(master);
  const bool written = std::exchange(weight.state, now).version != now.version;
  if (weight.way == Weight::Way::as_is && same_place) return;
  forget_group(weight);
  if (weight.way == Weight::Way::streamed && same_place) {
    if (written) refetch(weight);
    return;
  }
  classify(weight, master_object, Mappings::of_this_process());
  if (weight.way != Weight::Way::streamed) return;
  const SourcePtr old = weight.planned ? engine_->source(weight.id) : nullptr;
  if (old && weight.source->count == old->count && weight.source->stored == old->stored &&
      weight.source->wanted == old->wanted) {
    engine_->update_source(weight.id, weight.source);
  } else {
    weight.way = Weight::Way::converted;
  }
}

void Session::forget_group(Weight& weight) {
  if (!weight.planned) return weight.forget();
  // They share one copy. Did the session go on keeping one of them, there would be no room for the next.
  for (const WeightId id : engine_->companions(weight.id)) by_id_[id]->forget();
}

void Session::refetch(Weight& weight) {
  forget_group(weight);
  weight.silent.look(*weight.source);
  engine_->update_source(weight.id, weight.source);
}

void Session::look_for_silent_writes() {
  for (const auto& weight : weights_) {
    if (weight->cached == nullptr) continue;
    write_back(*weight);
    // Looking at a file mapping costs a system call a weight; it is looked at when it is fetched.
    if (!weight->source->file && weight->silent.look(*weight->source)) refetch(*weight);
  }
}

void Session::write_back(Weight& weight) {
  const auto alive = weight.latest.lock();
  HandedOut* const record = alive ? HandedOut::of(*alive) : nullptr;
  if (record == nullptr) return;
  if (const auto written = record->write_back()) {
    // The tensor that was written is the newest there is, so it stays the one to hand out.
    weight.state = *written;
    weight.silent.look(*weight.source);
  }
}

void Session::flush() {
  for (const auto& weight : weights_) {
    if (weight->way == Weight::Way::streamed) write_back(*weight);
  }
}

}  // namespace dynswap
