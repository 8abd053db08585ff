#include "bindings/call.h"

#include <optional>

#include "bindings/attribute.h"
#include "bindings/errors.h"
#include "bindings/saved.h"

namespace dynswap {

namespace {

thread_local int depth = 0;

/// What Python calls an instance of a Python class with; finds the class's `__call__`.
ternaryfunc plain_call() {
  static const ternaryfunc slot = [] {
    const py::object module = py::module_::import("torch.nn").attr("Module");
    return reinterpret_cast<PyTypeObject*>(module.ptr())->tp_call;
  }();
  return slot;
}

PyObject* call(PyObject* self, PyObject* arguments, PyObject* keywords) {
  const bool outermost = !inside_call();
  const InsideCall inside;
  try {
    std::optional<RefetchInBackward> hooks;
    const bool refetch = RefetchInBackward::wanted();
    if (outermost || refetch) {
      const py::object dict = module_dict(self);
      ModuleState* const state = module_state(self, dict.ptr());
      if (state != nullptr && outermost && (*state->session)->outdated()) {
        py::module_::import("dynswap_ext.install").attr("plan_again")(py::handle(state->session_object));
      }
      if (state != nullptr && refetch && (*state->session)->streams_any()) hooks.emplace();
    }
    return plain_call()(self, arguments, keywords);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

}  // namespace

void serve_calls(PyTypeObject* type) noexcept {
  if (type->tp_call != &call) type->tp_call = &call;
}

InsideCall::InsideCall() noexcept { ++depth; }

InsideCall::~InsideCall() { --depth; }

bool inside_call() noexcept { return depth > 0; }

}  // namespace dynswap
