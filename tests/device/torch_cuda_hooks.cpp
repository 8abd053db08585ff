// The hooks of the device of type CUDA.
#include <ATen/detail/CUDAHooksInterface.h>

#include "torch_hooks.h"

namespace pretend {

namespace {

// Registered by this name, under which torch asks for them.
struct CUDAHooks final : Hooks<at::CUDAHooksInterface> {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return isAvailable(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  int getNumGPUs() const override { return deviceCount(); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    checked([&] { synchronise_device(device, "synchronize"); });
  }
  std::string showConfig() const override { return "a pretend device"; }
};

}  // namespace

using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace pretend
