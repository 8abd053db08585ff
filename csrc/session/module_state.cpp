#include "session/module_state.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "session/errors.h"
#include "session/session.h"

namespace dynswap {

namespace {

PyTypeObject* state_type = nullptr;

void free_state(PyObject* self) {
  auto* const state = reinterpret_cast<ModuleState*>(self);
  PyTypeObject* const type = Py_TYPE(self);
  {
    const std::unique_ptr<std::vector<Entry>> entries(state->entries);
    const std::unique_ptr<std::shared_ptr<Session>> session(state->session);
    if (session && entries) (*session)->module_gone(*entries);
  }
  Py_CLEAR(state->session_object);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* state_session(PyObject* self, void*) {
  return Py_NewRef(reinterpret_cast<ModuleState*>(self)->session_object);
}

PyObject* state_place(PyObject* self, void* closure) {
  try {
    const Session& session = **reinterpret_cast<ModuleState*>(self)->session;
    if (closure == nullptr) return py::cast(session.device()).release().ptr();
    return py::cast(session.dtype()).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

/// A copy of a module is a plain module: the state is copied, and pickled, as None.
PyObject* copy_as_none(PyObject*, PyObject*) { return Py_NewRef(Py_None); }

PyObject* reduce_to_none(PyObject*, PyObject*) {
  return Py_BuildValue("(O())", reinterpret_cast<PyObject*>(Py_TYPE(Py_None)));
}

}  // namespace

PyObject* find_in(PyObject* dict, PyObject* container, PyObject* name) {
  PyObject* const held = PyDict_GetItemWithError(dict, container);
  return held != nullptr && PyDict_Check(held) ? PyDict_GetItemWithError(held, name) : nullptr;
}

const Names& Names::get() {
  static const Names names{PyUnicode_InternFromString("_dynswap"), PyUnicode_InternFromString("_parameters"),
                           PyUnicode_InternFromString("_buffers"), PyUnicode_InternFromString("_modules"),
                           PyUnicode_InternFromString("training")};
  return names;
}

py::object module_dict(PyObject* module) {
  PyObject* const dict = PyObject_GenericGetDict(module, nullptr);
  if (dict == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(dict);
}

namespace {

ModuleState* as_state(PyObject* object) noexcept {
  return Py_TYPE(object) == state_type ? reinterpret_cast<ModuleState*>(object) : nullptr;
}

}  // namespace

ModuleState* module_state(PyObject* module, PyObject* dict) {
  PyObject* const found = PyDict_GetItemWithError(dict, Names::get().state);
  auto* const state = found == nullptr ? nullptr : as_state(found);
  return state != nullptr && (state->owner == module || state->dict == dict) ? state : nullptr;
}

PyObject* master_of(PyObject* dict, const Entry& entry) {
  const Names& names = Names::get();
  PyObject* const held = find_in(dict, entry.parameter ? names.parameters : names.buffers, entry.name.ptr());
  return held != nullptr && THPVariable_Check(held) ? held : nullptr;
}

Entry* ModuleView::entry(const py::object& name) const {
  if (state == nullptr) return nullptr;
  const auto found = std::find_if(state->entries->begin(), state->entries->end(),
                                  [&](const Entry& entry) { return entry.name.equal(name); });
  return found == state->entries->end() ? nullptr : &*found;
}

ModuleState* as_module_state(PyObject* module, PyObject* object) noexcept {
  auto* const state = as_state(object);
  return state != nullptr && state->owner == module ? state : nullptr;
}

py::object new_module_state(PyObject* module, const py::object& session, std::vector<Entry> entries) {
  PyObject* const self = state_type->tp_alloc(state_type, 0);
  if (self == nullptr) throw py::error_already_set();
  auto* const state = reinterpret_cast<ModuleState*>(self);
  state->owner = module;
  state->dict = module_dict(module).ptr();
  state->entries = new std::vector<Entry>(std::move(entries));
  state->session = new std::shared_ptr<Session>(session.cast<std::shared_ptr<Session>>());
  (*state->session)->module_attached();
  state->session_object = Py_NewRef(session.ptr());
  return py::reinterpret_steal<py::object>(self);
}

bool may_refer_back(PyObject* master) {
  const at::Tensor& tensor = THPVariable_Unpack(master);
  namespace autograd = torch::autograd::impl;
  const bool in_graphs = autograd::get_autograd_meta(tensor) != nullptr;
  if (in_graphs && (!autograd::hooks(tensor).empty() || autograd::post_acc_grad_hooks(tensor))) return true;
  const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(master, nullptr));
  if (!attributes) throw py::error_already_set();
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(attributes.ptr(), &at, &name, &value) != 0;) {
    // A LosslessTensor's content has tensors alone.
    if (PyObject_IS_GC(value) && PyUnicode_CompareWithASCIIString(name, "_dynswap_content") != 0) return true;
  }
  return false;
}

std::vector<Visited> modules_of(PyObject* root) {
  std::vector<Visited> found;
  std::unordered_set<PyObject*> seen;
  std::vector<Visited> stack{{py::reinterpret_borrow<py::object>(root), ""}};
  while (!stack.empty()) {
    Visited next = std::move(stack.back());
    stack.pop_back();
    if (!seen.insert(next.module.ptr()).second) continue;
    const py::object dict = module_dict(next.module.ptr());
    PyObject* const children = PyDict_GetItemWithError(dict.ptr(), Names::get().modules);
    if (children != nullptr && PyDict_Check(children)) {
      const std::size_t first_child = stack.size();
      PyObject *name = nullptr, *child = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(children, &at, &name, &child) != 0;) {
        if (child == Py_None) continue;
        stack.push_back({py::reinterpret_borrow<py::object>(child),
                         next.prefix + py::cast<std::string>(py::handle(name)) + "."});
      }
      std::reverse(stack.begin() + static_cast<std::ptrdiff_t>(first_child), stack.end());
    }
    found.push_back(std::move(next));
  }
  return found;
}

py::list list_of(const std::vector<Visited>& modules) {
  py::list list;
  for (const Visited& visited : modules) list.append(visited.module);
  return list;
}

py::object own_attribute(PyTypeObject* type, PyObject* name) {
  const py::object namespace_of_type = type_dict(type);
  return py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(namespace_of_type.ptr(), name));
}

void set_class(PyObject* module, PyTypeObject* type) {
  static PyObject* const descriptor = [] {
    const py::str name("__class__");
    return own_attribute(&PyBaseObject_Type, name.ptr()).release().ptr();
  }();
  if (Py_TYPE(descriptor)->tp_descr_set(descriptor, module, reinterpret_cast<PyObject*>(type)) != 0) {
    throw py::error_already_set();
  }
}

void define_module_state() {
  static PyGetSetDef state_attributes[] = {
      {"session", &state_session, nullptr, "The install it belongs to.", nullptr},
      {"device", &state_place, nullptr, "Where the module computes.", nullptr},
      {"dtype", &state_place, nullptr, "What floating weights are cast into, or None.", state_attributes},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMethodDef state_methods[] = {{"__copy__", &copy_as_none, METH_NOARGS, nullptr},
                                        {"__deepcopy__", &copy_as_none, METH_O, nullptr},
                                        {"__reduce__", &reduce_to_none, METH_NOARGS, nullptr},
                                        {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot state_slots[] = {{Py_tp_doc, const_cast<char*>("What an installed module carries.")},
                                      {Py_tp_dealloc, reinterpret_cast<void*>(&free_state)},
                                      {Py_tp_getset, state_attributes},
                                      {Py_tp_methods, state_methods},
                                      {0, nullptr}};
  state_type = make_type({"dynswap_ext._C.ModuleState", sizeof(ModuleState), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, state_slots});
}

}  // namespace dynswap
