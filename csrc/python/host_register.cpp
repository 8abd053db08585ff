#include "python/host_register.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <utility>

#include "accelerator/device_runtime.h"
#include "transfer/usable_devices.h"

namespace dynswap {
namespace {

constexpr unsigned kPortable = 1;  // cudaHostRegisterPortable: locked for every device of the process

/// The runtime that `torch.cuda.cudart()` returns, in NVIDIA's and in AMD's builds alike.
py::object runtime() { return py::module_::import("torch.cuda").attr("cudart")(); }

std::string refusal(const py::object& error) {
  return py::str(runtime().attr("cudaGetErrorString")(error)).cast<std::string>();
}

bool succeeded(const py::object& error) { return py::int_(error).cast<int>() == 0; }

/// Memory that is locked while it lives.
class Registration {
 public:
  Registration(const c10::Device& device, std::byte* block)
      : device_(device), address_(reinterpret_cast<std::uintptr_t>(block)) {}
  ~Registration() {
    if (!devices_usable() || !Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    try {
      const c10::DeviceGuard guard(device_);
      if (!succeeded(runtime().attr("cudaHostUnregister")(address_))) forget_last_error();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("dynswap_ext: page-locked memory could not be unlocked");
    } catch (const c10::Error&) {
      // the device is lost, and its registrations with it
    }
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  const c10::Device device_;
  const std::uintptr_t address_;
};

std::shared_ptr<void> register_block(const c10::Device& device, std::byte* block, std::size_t bytes,
                                     std::string& reason) {
  const py::gil_scoped_acquire gil;
  try {
    const c10::DeviceGuard guard(device);  // else a context is made on device 0
    const py::object error =
        runtime().attr("cudaHostRegister")(reinterpret_cast<std::uintptr_t>(block), bytes, kPortable);
    if (succeeded(error)) return std::make_shared<Registration>(device, block);
    forget_last_error();
    reason = refusal(error);
  } catch (py::error_already_set& error) {
    reason = error.what();
  }
  return nullptr;
}

}  // namespace

HostRegister host_register_for(const c10::Device& device) {
  if (!device.is_cuda()) return nullptr;
  return [device](std::byte* block, std::size_t bytes, std::string& reason) {
    return register_block(device, block, bytes, reason);
  };
}

}  // namespace dynswap
