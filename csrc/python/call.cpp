#include "python/call.h"

#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <utility>

#include "session/calls.h"
#include "session/errors.h"
#include "session/module_state.h"
#include "session/saved_hooks.h"
#include "session/session.h"

namespace dynswap {

namespace {

/// Calls the `__call__` of the class that `self` had before the install. The swap class's own is for those
/// that read it (Note [A call is a slot]).
PyObject* plain_call(PyObject* self, PyObject* arguments, PyObject* keywords) {
  static PyObject* const kOriginal = PyUnicode_InternFromString("_dynswap_original");
  static PyObject* const kCall = PyUnicode_InternFromString("__call__");
  PyTypeObject* const type = Py_TYPE(self);
  auto* original = reinterpret_cast<PyTypeObject*>(_PyType_Lookup(type, kOriginal));
  if (original == nullptr) original = type;  // the model was uninstalled as the call began
  const auto found = py::reinterpret_borrow<py::object>(_PyType_Lookup(original, kCall));
  if (!PyType_HasFeature(Py_TYPE(found.ptr()), Py_TPFLAGS_METHOD_DESCRIPTOR)) {
    const descrgetfunc bind = Py_TYPE(found.ptr())->tp_descr_get;
    if (bind == nullptr) return PyObject_Call(found.ptr(), arguments, keywords);
    const auto bound =
        py::reinterpret_steal<py::object>(bind(found.ptr(), self, reinterpret_cast<PyObject*>(type)));
    return bound ? PyObject_Call(bound.ptr(), arguments, keywords) : nullptr;
  }
  c10::SmallVector<PyObject*, 8> with_self{self};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i)
    with_self.push_back(PyTuple_GET_ITEM(arguments, i));
  return PyObject_VectorcallDict(found.ptr(), with_self.data(), with_self.size(), keywords);
}

/// Python's error stays set.
void fail_call(PyObject* self) {
  py::error_already_set error;
  if (ModuleState* const state = ModuleView(self).state) {
    const std::shared_ptr<Session> session = *state->session;
    session->call_failed(py::reinterpret_borrow<py::object>(state->session_object), error);
  }
  error.restore();
}

PyObject* call(PyObject* self, PyObject* arguments, PyObject* keywords) {
  try {
    const ModuleView view(self);
    const ModuleState* const state = view.state;
    const Session* const serving = state != nullptr ? state->session->get() : nullptr;
    const bool outermost = !inside_call();
    const Session* const around = calling_session();
    const bool outermost_of_session = serving != nullptr && !inside_call_of(*serving);
    std::shared_ptr<Session> session;
    const InsideCall inside(serving, self);
    std::optional<RefetchInBackward> hooks;
    const bool refetch = RefetchInBackward::wanted();
    // A call around this one holds the session, unless it is another's (Note [An install takes another's
    // place]).
    if (serving != nullptr && (outermost_of_session || refetch || around != serving)) {
      session = *state->session;
      if (outermost_of_session) {
        const auto session_object = py::reinterpret_borrow<py::object>(state->session_object);
        session->call_begins();
        session->announce_call(session_object, py::reinterpret_borrow<py::object>(self));
      }
      if (refetch &&
          (session->fetches_any_again() || session->offload() || RefetchInBackward::seen_by_others()))
        hooks.emplace();
    }
    auto result = py::reinterpret_steal<py::object>(plain_call(self, arguments, keywords));
    if (outermost || outermost_of_session) {
      const py::error_scope keep;
      try {
        if (outermost) write_back_buffers();
        if (outermost_of_session) session->call_ends();
      } catch (...) {
        if (result) throw;  // else the call's own error is told
      }
    }
    if (outermost_of_session && !result) fail_call(self);
    return result.release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

}  // namespace

OffloadingScope::OffloadingScope(std::shared_ptr<Session> session) : session_(std::move(session)) {
  if (!inside_call_of(*session_)) session_->call_begins();
  inside_.emplace(*session_);
  if (RefetchInBackward::possible()) hooks_.emplace();
}

void OffloadingScope::end() {
  if (thread_ != std::this_thread::get_id()) return;
  hooks_.reset();
  inside_.reset();
  session_.reset();
}

void serve_calls(PyTypeObject* type) noexcept {
  if (type->tp_call != &call) type->tp_call = &call;
}

py::object serving_calls(const py::object& make) {
  return py::cpp_function([make](const py::object& original) {
    py::object made = make(original);
    if (!made.is_none()) serve_calls(reinterpret_cast<PyTypeObject*>(made.ptr()));
    return made;
  });
}

}  // namespace dynswap
