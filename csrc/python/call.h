// Calling an installed module.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <thread>

#include "session/calls.h"
#include "session/saved_hooks.h"

namespace dynswap {

/// Note [A call is a slot]
/// A swap class is called through the type slot `tp_call`, and not through a `__call__` in its namespace:
/// that would cost each call of each module a Python function, and torch.compile takes a module whose
/// `__call__` is not nn.Module's for one that it has to trace through. The `__call__` in the namespace is for
/// code that reads the attribute and calls that, as transformers does (call_by_name.py): it calls the module.
/// Python sets the slot anew when somebody patches `__call__` of the swap class; then the next access through
/// the class's descriptors puts it back. A `torch.fx.GraphModule` patches its own class's, and has it put
/// back at once (torch_modules.py). See also Note [What CPython has to be like] in session/cpython.h.
void serve_calls(PyTypeObject* type) noexcept;

/// Code of a program whose saved tensors leave the device: what `dynswap_ext.offload_activations` encloses.
/// Ended on another thread, it goes on where it was made.
class OffloadingScope {
 public:
  explicit OffloadingScope(std::shared_ptr<Session> session);
  void end();

 private:
  std::shared_ptr<Session> session_;
  std::optional<InsideOffloading> inside_;
  std::optional<RefetchInBackward> hooks_;
  const std::thread::id thread_ = std::this_thread::get_id();
};

/// A function that makes swap classes as `make` does, and has their calls served.
py::object serving_calls(const py::object& make);

}  // namespace dynswap
