// Calling an installed module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

namespace dynswap {

class Session;
struct Weight;

/// Note [A call is a slot]
/// A swap class is called through the type slot `tp_call`, and not through a `__call__` in its namespace:
/// that would cost each call of each module a Python function, and torch.compile takes a module whose
/// `__call__` is not nn.Module's for one that it has to trace through. Python sets the slot anew when
/// somebody patches `nn.Module.__call__`; then the next access through the class's descriptors puts it back.
/// A `torch.fx.GraphModule` patches its own class's, and has it put back at once (graph_modules.py). See also
/// Note [What CPython has to be like] in cpython.h.
void serve_calls(PyTypeObject* type) noexcept;

/// While it lives, its thread is inside the call of a module that this session serves, if any does. `module`
/// is that one, and lives longer.
class InsideCall {
 public:
  explicit InsideCall(const Session* session, PyObject* module = nullptr);
  ~InsideCall();
  InsideCall(const InsideCall&) = delete;
  InsideCall& operator=(const InsideCall&) = delete;
};

/// Whether this thread is inside the call of an installed module: what is read there is read by a forward,
/// and not by somebody who looks at the model.
bool inside_call() noexcept;
bool inside_call_of(const Session& session) noexcept;
/// The session whose module's call this thread entered last; null if it is in none.
const Session* innermost_session() noexcept;

/// The master of a weight, or what the weight is a part of, from a module whose call this thread is in, or
/// from one below it; null if none has it, or in another shape than `shown`.
py::object master_held_by_callers(const Weight& weight, const at::Tensor& shown);

}  // namespace dynswap
