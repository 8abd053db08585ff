#include "python/interpreter.h"

#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/utils/pybind.h>

#include "python/host_register.h"
#include "tensor/interpreter.h"

namespace dynswap {

void serve_interpreter() noexcept {
  Interpreter::get() = {
      .release_lock = [] { return static_cast<void*>(PyEval_SaveThread()); },
      .take_lock = [](void* thread) { PyEval_RestoreThread(static_cast<PyThreadState*>(thread)); },
      .make_object =
          [](const Interpreter::NodePointer& node) {
            const auto object = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
            if (!object) throw py::error_already_set();
          },
      .host_register = &host_register_for,
  };
}

}  // namespace dynswap
