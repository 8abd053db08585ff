#include "python/attribute.h"

#include <algorithm>

#include <utility>

#include "python/call.h"
#include "session/calls.h"
#include "session/cpython.h"
#include "session/errors.h"
#include "session/module_state.h"
#include "session/session.h"

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

}  // namespace

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
  PyTypeObject* const type = make_type(
      {"dynswap_ext._C.Attribute", static_cast<int>(PyProperty_Type.tp_basicsize + sizeof(PyObject*)), 0,
       Py_TPFLAGS_DEFAULT, attribute_slots},
      &PyProperty_Type);
  m.add_object("Attribute", reinterpret_cast<PyObject*>(type));
}

}  // namespace dynswap
