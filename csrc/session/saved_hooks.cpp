#include "session/saved_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <limits>
#include <memory>
#include <utility>

#include "accelerator/plain_torch.h"
#include "session/calls.h"
#include "session/errors.h"
#include "session/saved.h"
#include "session/session.h"
#include "tensor/master.h"

namespace dynswap {

namespace {

const at::Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }

/// A Python object that owns a C++ one, and is known by its name.
template <class Owned>
py::object as_capsule(std::unique_ptr<Owned> owned, const char* name) {
  const py::capsule made(owned.get(), name, [](void* pointer) { delete static_cast<Owned*>(pointer); });
  static_cast<void>(owned.release());
  return made;
}

template <class Result>
PyObject* or_python_error(const Result& result) noexcept {
  try {
    return result().release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

// Ours alone.

constexpr const char* kSaved = "dynswap_ext.saved";

PyObject* pack(PyObject*, PyObject* object) {
  return or_python_error([&]() -> py::object {
    std::unique_ptr<Saved> saved = reference_to(tensor_of(object));
    const Session* const session = saved ? nullptr : innermost_offloading_session(tensor_of(object).device());
    if (session != nullptr) saved = session->offloaded(tensor_of(object));
    return as_capsule(saved ? std::move(saved) : kept(tensor_of(object)), kSaved);
  });
}

py::object unpacked(PyObject* capsule) {
  auto* const saved = static_cast<Saved*>(PyCapsule_GetPointer(capsule, kSaved));
  if (saved == nullptr) throw py::error_already_set();
  return py::cast(saved->unpack());
}

PyObject* unpack(PyObject*, PyObject* object) {
  return or_python_error([&] { return unpacked(object); });
}

// Over those of others: `inner` is the pair of theirs. What stands for a weight is a pair of ours and theirs.

py::object ask(PyObject* inner, Py_ssize_t which, py::handle what) {
  return py::handle(PyTuple_GET_ITEM(inner, which))(what);
}

bool is_pair_with(PyObject* object, const char* name) {
  return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 2 &&
         PyCapsule_IsValid(PyTuple_GET_ITEM(object, 0), name) != 0;
}

constexpr const char* kLent = "dynswap_ext.lent";

/// What others were given instead of a saved tensor.
struct Lent {
  at::Tensor given;
  std::unique_ptr<Saved> saved;  ///< what to use if they leave that alone
  at::TensorOptions options;     ///< of the saved tensor
};

/// Whether two tensors show the same bytes in the same way.
bool same(const at::Tensor& one, const at::Tensor& other) {
  const auto& a = *one.unsafeGetTensorImpl();
  const auto& b = *other.unsafeGetTensorImpl();
  if (&a == &b) return true;
  return has_layout(a) && has_layout(b) && a.unsafe_storage().is_alias_of(b.unsafe_storage()) &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.dtype() == b.dtype() && one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

PyObject* pack_over(PyObject* inner, PyObject* object) {
  return or_python_error([&]() -> py::object {
    const at::Tensor& tensor = tensor_of(object);
    const OfMaster of = of_master(tensor);
    if (!of.tensor.defined()) return ask(inner, 0, object);
    py::object given = of.whole != nullptr ? master_held_by_callers(*of.whole, tensor) : py::object();
    if (!given) given = Session::as_object(of.tensor, of.whole != nullptr && of.whole->parameter);
    std::unique_ptr<Saved> saved = reference_to(tensor);
    auto lent = std::make_unique<Lent>(
        Lent{tensor_of(given.ptr()), saved ? std::move(saved) : kept(tensor), tensor.options()});
    const std::uint32_t version = version_of(lent->given);
    const py::object theirs = ask(inner, 0, given);
    if (version_of(lent->given) != version) {
      throw std::runtime_error(
          "A saved tensor pack hook is modifying its input in place. Tensors provided as input to pack hook "
          "can not be modified by in-place operations as this can lead to unexpected side-effects.");
    }
    return py::make_tuple(as_capsule(std::move(lent), kLent), theirs);
  });
}

PyObject* unpack_over(PyObject* inner, PyObject* object) {
  return or_python_error([&]() -> py::object {
    if (!is_pair_with(object, kLent)) return ask(inner, 1, object);
    auto* const lent = static_cast<Lent*>(PyCapsule_GetPointer(PyTuple_GET_ITEM(object, 0), kLent));
    const py::object theirs = ask(inner, 1, PyTuple_GET_ITEM(object, 1));
    if (!THPVariable_Check(theirs.ptr())) return theirs;  // torch says what is wrong with it
    const at::Tensor& tensor = tensor_of(theirs.ptr());
    if (same(tensor, lent->given)) return py::cast(lent->saved->unpack());
    const at::NoGradGuard no_graph;
    return py::cast(tensor.to(lent->options.device(), lent->options.dtype().toScalarType()));
  });
}

// Over those of torch.utils.checkpoint.

/// What the storage of a stand-in owns.
struct StandIn {
  at::Tensor bytes;
  std::shared_ptr<Saved> saved;
};

void delete_stand_in(void* context) { delete static_cast<StandIn*>(context); }

/// A tensor that is like `tensor` in all but its bytes. Were it ever computed with, that should show.
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

constexpr const char* kStoodIn = "dynswap_ext.stood_in";

PyObject* pack_in_checkpoint(PyObject* inner, PyObject* object) {
  return or_python_error([&]() -> py::object {
    const std::shared_ptr<Saved> saved = reference_to(tensor_of(object));
    if (!saved) return ask(inner, 0, object);
    const py::object theirs = ask(inner, 0, py::cast(stand_in_for(tensor_of(object), saved)));
    return py::make_tuple(as_capsule(std::make_unique<std::shared_ptr<Saved>>(saved), kStoodIn), theirs);
  });
}

PyObject* unpack_in_checkpoint(PyObject* inner, PyObject* object) {
  return or_python_error([&]() -> py::object {
    if (!is_pair_with(object, kStoodIn)) {
      const py::object theirs = ask(inner, 1, object);
      // Saved whole in the forward pass, a stand-in when it was computed again.
      Saved* const saved = THPVariable_Check(theirs.ptr()) ? saved_behind(tensor_of(theirs.ptr())) : nullptr;
      return saved == nullptr ? theirs : py::cast(saved->unpack());
    }
    ask(inner, 1, PyTuple_GET_ITEM(object, 1));
    void* const saved = PyCapsule_GetPointer(PyTuple_GET_ITEM(object, 0), kStoodIn);
    return py::cast((*static_cast<std::shared_ptr<Saved>*>(saved))->unpack());
  });
}

struct SavedTensorHooks {
  SavedTensorHooks(PyMethodDef& pack_def, PyMethodDef& unpack_def, PyObject* self)
      : pack(py::reinterpret_steal<py::object>(PyCFunction_New(&pack_def, self))),
        unpack(py::reinterpret_steal<py::object>(PyCFunction_New(&unpack_def, self))) {
    if (!pack || !unpack) throw py::error_already_set();
  }
  py::object pack, unpack;
};

/// The innermost hooks of this thread, borrowed; null if there are none.
std::pair<PyObject*, PyObject*> innermost() {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
  if (hooks.stack.empty() || hooks.is_tracing) return {nullptr, nullptr};
  const auto& [pack, unpack] = hooks.stack.top();
  return {pack.ptr(getPyInterpreter()), unpack.ptr(getPyInterpreter())};
}

bool is_ours(PyObject* hook) {
  if (!PyCFunction_CheckExact(hook)) return false;
  const PyCFunction runs = PyCFunction_GET_FUNCTION(hook);
  return runs == &pack || runs == &pack_over || runs == &pack_in_checkpoint;
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

SavedTensorHooks ours_over_the_innermost() {
  static PyMethodDef alone[] = {{"dynswap_pack", &pack, METH_O, nullptr},
                                {"dynswap_unpack", &unpack, METH_O, nullptr}};
  static PyMethodDef over[] = {{"dynswap_pack_over", &pack_over, METH_O, nullptr},
                               {"dynswap_unpack_over", &unpack_over, METH_O, nullptr}};
  static PyMethodDef in_checkpoint[] = {
      {"dynswap_pack_in_checkpoint", &pack_in_checkpoint, METH_O, nullptr},
      {"dynswap_unpack_in_checkpoint", &unpack_in_checkpoint, METH_O, nullptr}};
  const auto [pack, unpack] = innermost();
  if (pack == nullptr) {
    static const auto* const hooks = new SavedTensorHooks(alone[0], alone[1], nullptr);
    return *hooks;
  }
  const py::tuple inner = py::make_tuple(py::handle(pack), py::handle(unpack));
  PyMethodDef* const defs = of_checkpoint(pack) ? in_checkpoint : over;
  return {defs[0], defs[1], inner.ptr()};
}

void push(const SavedTensorHooks& hooks) {
  at::SavedTensorDefaultHooks::lazy_initialize();
  at::SavedTensorDefaultHooks::push_hooks(
      c10::SafePyObject(py::object(hooks.pack).release().ptr(), getPyInterpreter()),
      c10::SafePyObject(py::object(hooks.unpack).release().ptr(), getPyInterpreter()));
}

}  // namespace

bool RefetchInBackward::possible() {
  if (!at::SavedTensorDefaultHooks::is_enabled()) return false;
  PyObject* const pack = innermost().first;
  return pack == nullptr || !is_ours(pack);
}

bool RefetchInBackward::wanted() { return at::GradMode::is_enabled() && possible(); }

bool RefetchInBackward::seen_by_others() {
  PyObject* const pack = innermost().first;
  return pack != nullptr && !is_ours(pack) && !of_checkpoint(pack);
}

void RefetchInBackward::stand_over_others() {
  if (!wanted() || innermost().first == nullptr) return;
  const SavedTensorHooks hooks = ours_over_the_innermost();
  at::SavedTensorDefaultHooks::pop_hooks();
  push(hooks);
}

RefetchInBackward::RefetchInBackward() { push(ours_over_the_innermost()); }

RefetchInBackward::~RefetchInBackward() { at::SavedTensorDefaultHooks::pop_hooks(); }

}  // namespace dynswap
