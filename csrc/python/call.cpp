#include "python/call.h"

#include <memory>
#include <optional>

#include "session/calls.h"
#include "session/errors.h"
#include "session/module_state.h"
#include "session/saved_hooks.h"
#include "session/session.h"

namespace dynswap {

namespace {

/// What Python calls an instance of a Python class with; finds the class's `__call__`.
ternaryfunc plain_call() {
  static const ternaryfunc slot = [] {
    const py::object module = py::module_::import("torch.nn").attr("Module");
    return reinterpret_cast<PyTypeObject*>(module.ptr())->tp_call;
  }();
  return slot;
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
      if (refetch && (session->fetches_any_again() || RefetchInBackward::seen_by_others())) hooks.emplace();
    }
    auto result = py::reinterpret_steal<py::object>(plain_call()(self, arguments, keywords));
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
