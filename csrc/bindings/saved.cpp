#include "bindings/saved.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "accelerator/plain_torch.h"
#include "bindings/errors.h"
#include "bindings/handed_out.h"
#include "bindings/session.h"
#include "core/protection.h"

namespace dynswap {

namespace {

constexpr const char* kCapsule = "dynswap_ext.saved";

/// What stands in the graph for a saved tensor.
struct Saved {
  virtual ~Saved() = default;
  virtual at::Tensor unpack() = 0;
};

void refuse_if_written(std::uint32_t saved, std::uint32_t now, const at::Tensor& tensor) {
  if (saved == now || !PROTECTED(saved_version_checked)) return;
  const std::string type = tensor.toString();
  const std::string sizes = c10::str(tensor.sizes());
  throw std::runtime_error(
      "one of the variables needed for gradient computation has been modified by an inplace operation: [" +
      type + " " + sizes + "] is at version " + std::to_string(now) + "; expected version " +
      std::to_string(saved) + " instead.");
}

/// Any other tensor. Detached: were it the tensor itself, an operation's output would own its own graph.
struct SavedTensor final : Saved {
  explicit SavedTensor(const at::Tensor& saved) : tensor(alias_of(saved)), version(version_of(tensor)) {}
  at::Tensor unpack() override {
    refuse_if_written(version, version_of(tensor), tensor);
    return tensor;
  }
  const at::Tensor tensor;
  const std::uint32_t version;
};

/// A weight that is copied again for backward, streamed or copied by torch, or a view of one.
struct SavedWeight final : Saved {
  SavedWeight(const HandedOut& record, const at::Tensor& view)
      : session(record.origin().session),
        weight(record.origin().weight),
        master(record.master()),
        sharing(record.sharing()),
        seen(sharing ? sharing->now() : Sharing::Seen{.version = version_of(master), .ours = 0}),
        options(view.options()),
        sizes(view.sizes().vec()),
        strides(view.strides().vec()),
        offset(view.storage_offset()) {}

  at::Tensor unpack() override {
    // Plain torch would have saved the master.
    if (!sharing || !sharing->only_ours_since(seen))
      refuse_if_written(seen.version, version_of(master), master);
    const std::shared_ptr<Session> serving = session.lock();
    at::Tensor whole = serving ? serving->fetch_again(*weight, master, reader) : at::Tensor();
    const PlainTorch guard;
    // The model was uninstalled since, or is gone.
    if (!whole.defined()) {
      const at::Tensor& readable = weight->mapped ? read_master(master, weight->name) : master;
      whole = readable.to(options, /*non_blocking=*/false, /*copy=*/true);
    }
    return whole.as_strided(sizes, strides, offset);
  }

  const std::weak_ptr<Session> session;
  const std::shared_ptr<Weight> weight;
  const at::Tensor master;
  const std::shared_ptr<Sharing> sharing;
  const Sharing::Seen seen;
  const at::TensorOptions options;
  const std::vector<std::int64_t> sizes, strides;
  const std::int64_t offset;
  const std::thread::id reader = std::this_thread::get_id();  ///< whose order backward takes up
};

std::unique_ptr<Saved> reference_to(const at::Tensor& tensor);

/// A wrapper (Note [Subclasses are taken apart]) with streamed weights in it.
struct SavedWrapper final : Saved {
  at::Tensor unpack() override {
    py::dict inner;
    for (const auto& [name, saved] : parts) inner[name] = py::cast(saved->unpack());
    return wrap(inner).cast<at::Tensor>();
  }
  std::vector<std::pair<py::object, std::unique_ptr<Saved>>> parts;
  py::object wrap;  ///< of its inner tensors
};

/// Null if nothing in it streams.
std::unique_ptr<Saved> wrapper_reference_to(const at::Tensor& tensor) {
  const Session* const session = innermost_session();
  const py::object flat =
      session == nullptr ? py::none() : session->hooks().flatten_wrapper(py::cast(tensor));
  if (flat.is_none()) return nullptr;
  const auto [inner, wrap] = flat.cast<std::pair<py::dict, py::object>>();
  auto saved = std::make_unique<SavedWrapper>();
  saved->wrap = wrap;
  bool any = false;
  for (const auto& [name, part] : inner) {
    const at::Tensor& held = THPVariable_Unpack(part.ptr());
    std::unique_ptr<Saved> reference = reference_to(held);
    any = any || reference;
    if (!reference) reference = std::make_unique<SavedTensor>(held);
    saved->parts.emplace_back(py::reinterpret_borrow<py::object>(name), std::move(reference));
  }
  return any ? std::move(saved) : nullptr;
}

PyObject* as_capsule(std::shared_ptr<Saved> saved) {
  auto owner = std::make_unique<std::shared_ptr<Saved>>(std::move(saved));
  PyObject* const capsule = PyCapsule_New(owner.get(), kCapsule, [](PyObject* self) {
    delete static_cast<std::shared_ptr<Saved>*>(PyCapsule_GetPointer(self, kCapsule));
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(owner.release());
  return capsule;
}

/// Whether the tensor is a copy that backward can have made again. A statistic is not, as the forward may
/// write it.
bool can_be_fetched_again(const Session& serving, const Weight& weight, const HandedOut& record) {
  if (record.watched() && !weight.parameter) return false;
  if (weight.path == Weight::AccessPath::copied || Session::sliced(weight)) return true;
  return record.leased() && serving.streams(weight);
}

/// The reference to keep instead of a tensor, or null if the tensor is to be kept itself.
std::unique_ptr<Saved> reference_to(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python))
    return wrapper_reference_to(tensor);
  if (tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg()) return nullptr;
  HandedOut* const record = HandedOut::of(*tensor.unsafeGetTensorImpl());
  if (record == nullptr || tensor.scalar_type() != record->dtype()) return nullptr;
  const std::shared_ptr<Weight> weight = record->origin().weight;
  const std::shared_ptr<Session> serving = record->origin().session.lock();
  if (!serving || !can_be_fetched_again(*serving, *weight, *record)) return nullptr;
  serving->write_back(*weight);
  if (!record->master_unchanged()) return nullptr;
  // The forward has written it, and the graph is to have what it wrote. (A leased copy is the engine's no
  // more.)
  if (weight->path == Weight::AccessPath::copied && record->rounded()) return nullptr;
  return std::make_unique<SavedWeight>(*record, tensor);
}

const at::Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }

PyObject* pack(PyObject*, PyObject* object) {
  try {
    std::unique_ptr<Saved> saved = reference_to(tensor_of(object));
    if (!saved) saved = std::make_unique<SavedTensor>(tensor_of(object));
    return as_capsule(std::move(saved));
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyObject* unpack(PyObject*, PyObject* object) {
  try {
    auto* const saved = static_cast<std::shared_ptr<Saved>*>(PyCapsule_GetPointer(object, kCapsule));
    return saved == nullptr ? nullptr : THPVariable_Wrap((*saved)->unpack());
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

struct SavedTensorHooks {
  py::object pack, unpack;
};

const SavedTensorHooks& our_hooks() {
  static PyMethodDef pack_def{"dynswap_pack", &pack, METH_O, nullptr};
  static PyMethodDef unpack_def{"dynswap_unpack", &unpack, METH_O, nullptr};
  static const auto* const hooks =
      new SavedTensorHooks{py::reinterpret_steal<py::object>(PyCFunction_New(&pack_def, nullptr)),
                           py::reinterpret_steal<py::object>(PyCFunction_New(&unpack_def, nullptr))};
  return *hooks;
}

/// What the storage of a stand-in owns.
struct StandIn {
  at::Tensor bytes;
  std::shared_ptr<Saved> saved;
};

void delete_stand_in(void* context) { delete static_cast<StandIn*>(context); }

/// As `tensor`, in all but its bytes. Were it ever computed with, that should show.
at::Tensor stand_in_for(const at::Tensor& tensor, std::shared_ptr<Saved> saved) {
  const PlainTorch guard;
  at::Tensor one = at::empty({1}, tensor.options());
  if (tensor.is_floating_point() || tensor.is_complex()) one.fill_(std::numeric_limits<double>::quiet_NaN());
  auto owner = std::make_unique<StandIn>(StandIn{one, std::move(saved)});
  void* const data = one.data_ptr();
  c10::Storage storage(c10::Storage::use_byte_size_t(), one.nbytes(),
                       c10::DataPtr(data, owner.release(), &delete_stand_in, one.device()),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), one.key_set(), one.dtype());
  const std::vector<std::int64_t> still(static_cast<std::size_t>(tensor.dim()), 0);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), still);
  return made;
}

Saved* saved_behind(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (!storage || storage.data_ptr().get_deleter() != &delete_stand_in) return nullptr;
  return static_cast<StandIn*>(storage.data_ptr().get_context())->saved.get();
}

/// Ours, over hooks that go on seeing every tensor that is saved.
SavedTensorHooks over(const py::object& inner_pack, const py::object& inner_unpack) {
  // A saved weight is (reference, what the inner hooks made of its stand-in).
  SavedTensorHooks hooks;
  hooks.pack = py::cpp_function([inner_pack](const py::object& object) -> py::object {
    const std::shared_ptr<Saved> saved = reference_to(tensor_of(object.ptr()));
    if (!saved) return inner_pack(object);
    const py::object inner = inner_pack(py::cast(stand_in_for(tensor_of(object.ptr()), saved)));
    return py::make_tuple(py::reinterpret_steal<py::object>(as_capsule(saved)), inner);
  });
  hooks.unpack = py::cpp_function([inner_unpack](const py::object& object) -> py::object {
    if (!PyTuple_CheckExact(object.ptr()) || PyTuple_GET_SIZE(object.ptr()) != 2 ||
        !PyCapsule_IsValid(PyTuple_GET_ITEM(object.ptr(), 0), kCapsule)) {
      const py::object tensor = inner_unpack(object);
      // Saved whole in the forward pass, a stand-in when it was computed again.
      Saved* const saved = THPVariable_Check(tensor.ptr()) ? saved_behind(tensor_of(tensor.ptr())) : nullptr;
      return saved == nullptr ? tensor : py::cast(saved->unpack());
    }
    inner_unpack(py::handle(PyTuple_GET_ITEM(object.ptr(), 1)));
    PyObject* const found = unpack(nullptr, PyTuple_GET_ITEM(object.ptr(), 0));
    if (found == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
  });
  return hooks;
}

/// The innermost hooks of this thread; null if there are none.
std::pair<PyObject*, PyObject*> innermost() {
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
  if (!hooks) return {nullptr, nullptr};
  return {hooks->first.ptr(getPyInterpreter()), hooks->second.ptr(getPyInterpreter())};
}

bool of_checkpoint(PyObject* hook) {
  static PyObject* const key = PyUnicode_InternFromString("__module__");
  static PyObject* const wanted = PyUnicode_InternFromString("torch.utils.checkpoint");
  PyObject* const module = PyObject_GetAttr(hook, key);
  if (module == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool found = PyUnicode_Check(module) && PyUnicode_Compare(module, wanted) == 0;
  Py_DECREF(module);
  return found;
}

void push(const SavedTensorHooks& hooks) {
  at::SavedTensorDefaultHooks::lazy_initialize();
  at::SavedTensorDefaultHooks::push_hooks(
      c10::SafePyObject(py::object(hooks.pack).release().ptr(), getPyInterpreter()),
      c10::SafePyObject(py::object(hooks.unpack).release().ptr(), getPyInterpreter()));
}

}  // namespace

bool RefetchInBackward::wanted() {
  if (!at::GradMode::is_enabled() || !at::SavedTensorDefaultHooks::is_enabled()) return false;
  PyObject* const pack = innermost().first;
  return pack == nullptr || of_checkpoint(pack);
}

RefetchInBackward::RefetchInBackward() {
  const auto [inner_pack, inner_unpack] = innermost();
  push(inner_pack == nullptr ? our_hooks()
                             : over(py::reinterpret_borrow<py::object>(inner_pack),
                                    py::reinterpret_borrow<py::object>(inner_unpack)));
}

RefetchInBackward::~RefetchInBackward() { at::SavedTensorDefaultHooks::pop_hooks(); }

}  // namespace dynswap
