// What torch.cuda has and a device of another type has not: graphs, and the CUDA runtime.
#include <torch/csrc/utils/pybind.h>

#include "torch_device.h"

extern "C" {
int cudaHostRegister(void* address, std::size_t bytes, unsigned flags);
int cudaHostUnregister(void* address);
int cudaPeekAtLastError();
}

namespace pretend {

namespace {

struct CudaGraph {
  std::shared_ptr<Graph> graph;
};

}  // namespace

void define_cuda(pybind11::module_& m) {
  namespace py = pybind11;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  m.def("isCurrentStreamCapturing", [] { return capturing(current_stream(current_device())); });
  m.def("canDeviceAccessPeer", [](int, int) { return true; });
  // As torch.cuda.cudart()'s, which clear no error.
  m.def(
      "pin",
      [](std::uintptr_t address, std::size_t bytes) {
        return cudaHostRegister(reinterpret_cast<void*>(address), bytes, 0);
      },
      without_gil);
  m.def(
      "unpin", [](std::uintptr_t address) { return cudaHostUnregister(reinterpret_cast<void*>(address)); },
      without_gil);
  m.def("last_error", [] { return cudaPeekAtLastError(); });
  m.def("driver_version", [] { return faults().driver_version; });

  py::class_<CudaGraph>(m, "CudaGraph")
      .def(py::init<>())
      .def("capture_begin",
           [](CudaGraph&, const std::string& mode) {
             begin_capture(current_stream(current_device()), mode == "global");
           })
      .def("capture_end",
           [](CudaGraph& self) {
             checked([&] { self.graph = end_capture(current_stream(current_device())); });
           })
      .def("replay",
           [](CudaGraph& self) {
             TORCH_CHECK(self.graph, "nothing has been captured");
             checked([&] { replay(current_stream(current_device()), *self.graph); });
           })
      .def("reset", [](CudaGraph& self) { self.graph.reset(); });
}

}  // namespace pretend
