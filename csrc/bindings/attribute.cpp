#include "bindings/attribute.h"

#include <algorithm>

#include <utility>

#include "bindings/call.h"
#include "bindings/cpython.h"
#include "bindings/errors.h"

namespace dynswap {

namespace {

/// Note [The descriptor is a property]
/// It derives from Python's `property` and overrides what runs: `__get__` and `__set__` in C. Its `fget`, a
/// Python function, is what torch.compile traces in its place (dynswap_ext/_swap/compile_support.py). The
/// name lies behind the base's fields, whose size only Python knows: Note [What CPython has to be like] in
/// cpython.h.
PyObject*& name_of(PyObject* attribute) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(attribute) + PyProperty_Type.tp_basicsize);
}

PyTypeObject* attribute_type = nullptr;
PyTypeObject* state_type = nullptr;

/// What the descriptor does not serve is found as if there were no descriptor: in the instance's __dict__,
/// else by the class's own __getattr__, which Python calls upon an AttributeError.
PyObject* fall_through(PyObject* module, PyObject* dict, PyObject* name) {
  if (PyObject* value = PyDict_GetItemWithError(dict, name)) return Py_NewRef(value);
  if (!PyErr_Occurred()) {
    PyErr_Format(PyExc_AttributeError, "'%.100s' object has no attribute '%U'", Py_TYPE(module)->tp_name,
                 name);
  }
  return nullptr;
}

PyObject* get(PyObject* self, PyObject* module, PyObject*) {
  if (module == nullptr || module == Py_None) return Py_NewRef(self);
  PyObject* const name = name_of(self);
  try {
    const Names& names = Names::get();
    const py::object dict = module_dict(module);
    ModuleState* const state = module_state(module, dict.ptr());
    if (state == nullptr) return fall_through(module, dict.ptr(), name);
    // As in plain torch: an attribute of the instance hides a parameter or buffer of the same name.
    if (PyObject* const own = PyDict_GetItemWithError(dict.ptr(), name)) return Py_NewRef(own);
    std::vector<Entry>& entries = *state->entries;
    std::size_t index = 0;
    while (index < entries.size() && entries[index].name.ptr() != name) ++index;
    if (index == entries.size()) return fall_through(module, dict.ptr(), name);
    const bool parameter = entries[index].parameter;
    PyObject* const master = find_in(dict.ptr(), parameter ? names.parameters : names.buffers, name);
    if (master == nullptr) return PyErr_Occurred() ? nullptr : fall_through(module, dict.ptr(), name);
    if (!THPVariable_Check(master) || entries[index].ignored) return Py_NewRef(master);
    bool training = false;
    if (!parameter) training = PyDict_GetItemWithError(dict.ptr(), names.training) == Py_True;
    const bool inside = inside_call();
    const Weight* const bound = entries[index].weight.get();
    const bool known =
        bound != nullptr && bound->state.impl == THPVariable_Unpack(master).unsafeGetTensorImpl();
    if (known && !training) {
      if (PyObject* const unchanged = (*state->session)->access_unchanged(*bound, master, inside))
        return unchanged;
    }
    // The slow path may run Python code (and let other threads run it), which may do anything to the model.
    const std::shared_ptr<Session> session = *state->session;
    const auto keep_state = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(state));
    const auto keep_master = py::reinterpret_borrow<py::object>(master);
    std::shared_ptr<Weight> weight = entries[index].weight;
    serve_calls(Py_TYPE(module));
    if (!known) {
      weight = weight == nullptr
                   ? session->added_weight(master, name, parameter, entries[index].casting).shared_from_this()
                   : session->weight_now(*weight, master, name).shared_from_this();
      entries[index].bind(weight);
    }
    return session->access(*weight, master, training, inside);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

int set(PyObject* self, PyObject* module, PyObject* value) {
  // Reached only by object.__setattr__: nn.Module's has found no parameter, buffer or module of this name.
  PyObject* const name = name_of(self);
  try {
    const py::object dict = module_dict(module);
    if (value != nullptr) return PyDict_SetItem(dict.ptr(), name, value);
    if (PyDict_DelItem(dict.ptr(), name) == 0) return 0;
    PyErr_SetObject(PyExc_AttributeError, name);
  } catch (...) {
    set_python_error();
  }
  return -1;
}

int initialise_attribute(PyObject* self, PyObject* arguments, PyObject* keywords) {
  PyObject *name = nullptr, *getter = nullptr;
  static const char* const kNames[] = {"name", "getter", nullptr};
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "UO", const_cast<char**>(kNames), &name, &getter))
    return -1;
  try {
    if (PyProperty_Type.tp_init(self, py::make_tuple(py::handle(getter)).ptr(), nullptr) != 0) return -1;
  } catch (...) {
    set_python_error();
    return -1;
  }
  Py_INCREF(name);
  PyUnicode_InternInPlace(&name);
  Py_XSETREF(name_of(self), name);
  return 0;
}

void free_attribute(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  Py_CLEAR(name_of(self));
  PyProperty_Type.tp_dealloc(self);
  Py_DECREF(type);
}

PyObject* serve_calls_of(PyObject*, PyObject* type) {
  if (!PyType_Check(type)) {
    PyErr_Format(PyExc_TypeError, "serve_calls() takes a class, got an instance of '%.100s'",
                 Py_TYPE(type)->tp_name);
    return nullptr;
  }
  serve_calls(reinterpret_cast<PyTypeObject*>(type));
  return Py_NewRef(Py_None);
}

PyObject* attribute_name(PyObject* self, void*) { return Py_NewRef(name_of(self)); }

PyObject* attribute_doc(PyObject*, void*) {
  return PyUnicode_FromString("Serves one managed name of a swap class.");
}

/// `property` gives instances of derived types a docstring of their own, which nobody needs here.
int ignore_doc(PyObject*, PyObject*, void*) { return 0; }

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

PyTypeObject* make_type(PyType_Spec spec, PyTypeObject* base = nullptr) {
  PyObject* const type = PyType_FromSpecWithBases(&spec, reinterpret_cast<PyObject*>(base));
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
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
    if (PyObject_IS_GC(value)) return true;
  }
  return false;
}

py::object Session::fetch_buffer(const py::object& module, const py::object& name) {
  const py::object dict = module_dict(module.ptr());
  ModuleState* const state = module_state(module.ptr(), dict.ptr());
  PyObject* const master = find_in(dict.ptr(), Names::get().buffers, name.ptr());
  if (state == nullptr || master == nullptr || !THPVariable_Check(master)) {
    throw py::attribute_error("the module has no buffer of the name " + py::cast<std::string>(name));
  }
  const auto keep_master = py::reinterpret_borrow<py::object>(master);
  const bool training = PyDict_GetItemWithError(dict.ptr(), Names::get().training) == Py_True;
  const InsideCall compiled(nullptr);
  for (Entry& entry : *state->entries) {
    if (entry.parameter || entry.ignored || !entry.name.equal(name)) continue;
    const std::shared_ptr<Weight> weight =
        entry.weight == nullptr
            ? added_weight(master, entry.name.ptr(), /*parameter=*/false, entry.casting).shared_from_this()
            : weight_now(*entry.weight, master, entry.name.ptr()).shared_from_this();
    entry.bind(weight);
    return py::reinterpret_steal<py::object>(access(*weight, master, training, /*inside=*/true));
  }
  return keep_master;
}

std::optional<at::ScalarType> Session::dtype_of(const py::object& module, const py::object& name) const {
  const py::object dict = module_dict(module.ptr());
  const ModuleState* const state = module_state(module.ptr(), dict.ptr());
  if (state == nullptr) return options_.dtype;
  for (const Entry& entry : *state->entries) {
    if (!entry.name.equal(name)) continue;
    PyObject* const master = find_in(
        dict.ptr(), entry.parameter ? Names::get().parameters : Names::get().buffers, entry.name.ptr());
    if (master == nullptr || !THPVariable_Check(master)) break;
    const Casting casting = entry.ignored ? Casting::never : entry.casting;
    return wanted_type(THPVariable_Unpack(master), options_.dtype, casting);
  }
  return options_.dtype;
}

void Session::keep_dtype(const py::object& module, const py::object& name) {
  const py::object dict = module_dict(module.ptr());
  const ModuleState* const state = module_state(module.ptr(), dict.ptr());
  if (state == nullptr) return;
  for (Entry& entry : *state->entries) {
    if (!entry.name.equal(name)) continue;
    entry.casting = Casting::never;
    if (entry.weight == nullptr) continue;
    if (entry.weight->holders > 1) {
      entry.bind(nullptr);  // the other modules' stays as it is
    } else {
      entry.weight->casting = Casting::never;
    }
  }
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

void define_attribute(py::module_& m) {
  static PyGetSetDef attribute_attributes[] = {
      {"name", &attribute_name, nullptr, "The name it serves.", nullptr},
      {"__doc__", &attribute_doc, &ignore_doc, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMethodDef attribute_methods[] = {
      {"serve_calls", &serve_calls_of, METH_O | METH_STATIC, "Notices calls of a swap class's instances."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot attribute_slots[] = {{Py_tp_init, reinterpret_cast<void*>(&initialise_attribute)},
                                          {Py_tp_dealloc, reinterpret_cast<void*>(&free_attribute)},
                                          {Py_tp_descr_get, reinterpret_cast<void*>(&get)},
                                          {Py_tp_descr_set, reinterpret_cast<void*>(&set)},
                                          {Py_tp_getset, attribute_attributes},
                                          {Py_tp_methods, attribute_methods},
                                          {0, nullptr}};
  attribute_type = make_type(
      {"dynswap_ext._C.Attribute", static_cast<int>(PyProperty_Type.tp_basicsize + sizeof(PyObject*)), 0,
       Py_TPFLAGS_DEFAULT, attribute_slots},
      &PyProperty_Type);

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
  m.add_object("Attribute", reinterpret_cast<PyObject*>(attribute_type));
}

}  // namespace dynswap
