// What the extension takes from CPython, beyond what every release of it promises.
#pragma once

#include <torch/csrc/utils/pybind.h>

/// Note [What CPython has to be like]
/// Four things here hold for the releases below, and no documentation promises them for the next one:
/// - `tp_call` of a class made in Python may be set, and a call of an instance runs it (call.cpp).
/// - `_PyType_Lookup` returns a borrowed reference to what a class or its bases have by a name (call.cpp).
/// - A type derived from `property` keeps fields of its own behind the base's, `property`'s own `tp_init` and
///   `tp_dealloc` serve the base's part, and the interpreter takes no short cut past `__get__` for it, as it
///   does for `property` itself (attribute.cpp).
/// - A reference count of one means that nobody else has the object (weight.h). Without the GIL counts are
///   split between threads, and from 3.14 on the interpreter's stack borrows references.
/// A new release is added here, and in build_backend/dynswap_build/supported.py, after benchmarks/matrix.py
/// has run with it.
#if !defined(PY_VERSION_HEX) || PY_VERSION_HEX < 0x030A0000 || PY_VERSION_HEX >= 0x030E0000
#error \
    "dynswap_ext._C is for CPython 3.10 to 3.13: Note [What CPython has to be like] in csrc/session/cpython.h"
#endif
#ifdef Py_GIL_DISABLED
#error \
    "dynswap_ext._C takes a CPython with the GIL: Note [What CPython has to be like] in csrc/session/cpython.h"
#endif
#ifdef PYPY_VERSION
#error "dynswap_ext._C is for CPython: Note [What CPython has to be like] in csrc/session/cpython.h"
#endif

namespace dynswap {

/// The namespace of a class. From Python 3.12 on, `tp_dict` of static built-in classes is null.
inline py::object type_dict(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  return py::reinterpret_steal<py::object>(PyType_GetDict(type));
#else
  return py::reinterpret_borrow<py::object>(type->tp_dict);
#endif
}

/// A class of the extension's own. Throws py::error_already_set.
inline PyTypeObject* make_type(PyType_Spec spec, PyTypeObject* base = nullptr) {
  PyObject* const type = PyType_FromSpecWithBases(&spec, reinterpret_cast<PyObject*>(base));
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace dynswap
