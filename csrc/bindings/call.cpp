#include "bindings/call.h"

#include <optional>

#include "bindings/attribute.h"
#include "bindings/cpython.h"
#include "bindings/errors.h"
#include "bindings/saved.h"
#include "bindings/written_buffers.h"

namespace dynswap {

namespace {

thread_local int depth = 0;
std::uint64_t begun = 0;

/// What Python calls an instance of a Python class with; finds the class's `__call__`.
ternaryfunc plain_call() {
  static const ternaryfunc slot = [] {
    const py::object module = py::module_::import("torch.nn").attr("Module");
    return reinterpret_cast<PyTypeObject*>(module.ptr())->tp_call;
  }();
  return slot;
}

void begin_pass(const ModuleState& state) {
  Session& session = **state.session;
  if ((session.outdated() || !session.on_pass().is_none()) && session.capturing()) return session.note_pass();
  if (session.outdated()) {
    py::module_::import("dynswap_ext.install").attr("plan_again")(py::handle(state.session_object));
  }
  session.pass_begins();
}

/// Python's error stays set.
void fail_call(PyObject* self) {
  py::error_already_set error;
  const py::object dict = module_dict(self);
  if (ModuleState* const state = module_state(self, dict.ptr())) {
    const std::shared_ptr<Session> session = *state->session;
    session->call_failed(error);
  }
  error.restore();
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
      if (state != nullptr && outermost) begin_pass(*state);
      if (state != nullptr && refetch && (*state->session)->streams_any()) hooks.emplace();
    }
    auto result = py::reinterpret_steal<py::object>(plain_call()(self, arguments, keywords));
    if (outermost) {
      {
        const py::error_scope keep;
        bring_home();
      }
      if (!result) fail_call(self);
    }
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

InsideCall::InsideCall() noexcept {
  if (depth++ == 0) ++begun;
}

InsideCall::~InsideCall() { --depth; }

bool inside_call() noexcept { return depth > 0; }

std::uint64_t calls_begun() noexcept { return begun; }

}  // namespace dynswap
