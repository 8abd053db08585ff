#include "bindings/call.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/attribute.h"
#include "bindings/cpython.h"
#include "bindings/errors.h"
#include "bindings/saved_hooks.h"
#include "bindings/written_buffers.h"

namespace dynswap {

namespace {

struct Call {
  const Session* session;  ///< null: none serves the module
  PyObject* module;        ///< borrowed; null: there is none
};

/// The calls that this thread is in, the innermost last.
std::vector<Call>& calls() noexcept {
  thread_local std::vector<Call> of_this_thread;
  return of_this_thread;
}

/// Whether a weight is what `entry` is the weight of, or a part of that.
bool is_of(const Weight& weight, const Entry& entry) {
  if (entry.weight == nullptr) return false;
  const auto& parts = entry.weight->parts;
  return entry.weight.get() == &weight || std::any_of(parts.begin(), parts.end(), [&](const auto& part) {
           return part.second.get() == &weight;
         });
}

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
  const py::object dict = module_dict(self);
  if (ModuleState* const state = module_state(self, dict.ptr())) {
    const std::shared_ptr<Session> session = *state->session;
    session->call_failed(py::reinterpret_borrow<py::object>(state->session_object), error);
  }
  error.restore();
}

PyObject* call(PyObject* self, PyObject* arguments, PyObject* keywords) {
  try {
    const py::object dict = module_dict(self);
    const ModuleState* const state = module_state(self, dict.ptr());
    const Session* const serving = state != nullptr ? state->session->get() : nullptr;
    const bool outermost = !inside_call();
    const Session* const around = outermost ? nullptr : calls().back().session;
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

InsideCall::InsideCall(const Session* session, PyObject* module) { calls().push_back({session, module}); }

InsideCall::~InsideCall() { calls().pop_back(); }

bool inside_call() noexcept { return !calls().empty(); }

const Session* innermost_session() noexcept {
  const auto found = std::find_if(calls().rbegin(), calls().rend(),
                                  [](const Call& call) { return call.session != nullptr; });
  return found == calls().rend() ? nullptr : found->session;
}

bool inside_call_of(const Session& session) noexcept {
  return std::any_of(calls().rbegin(), calls().rend(), [&](const Call& call) {
    return call.session == &session || (call.session != nullptr && call.session->succeeded_by(session));
  });
}

py::object master_held_by_callers(const Weight& weight, const at::Tensor& shown) {
  const std::vector<Call> running = calls();
  for (auto call = running.rbegin(); call != running.rend(); ++call) {
    if (call->module == nullptr) continue;
    for (const Visited& visited : modules_of(call->module)) {
      const py::object dict = module_dict(visited.module.ptr());
      const ModuleState* const state = module_state(visited.module.ptr(), dict.ptr());
      if (state == nullptr) continue;
      for (const Entry& entry : *state->entries) {
        if (!is_of(weight, entry)) continue;
        const Names& names = Names::get();
        PyObject* const master =
            find_in(dict.ptr(), entry.parameter ? names.parameters : names.buffers, entry.name.ptr());
        if (master == nullptr || !THPVariable_Check(master)) continue;
        const at::Tensor& tensor = THPVariable_Unpack(master);
        if (entry.weight->state.impl == tensor.unsafeGetTensorImpl() && tensor.sizes() == shown.sizes())
          return py::reinterpret_borrow<py::object>(master);
      }
    }
  }
  return {};
}

}  // namespace dynswap
