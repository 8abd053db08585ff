// What torch's hooks have in common for all types of devices.
#pragma once

#include "torch_device.h"

namespace pretend {

/// Serves at::CUDAHooksInterface or at::PrivateUse1HooksInterface.
template <class Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !faults().no_devices; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override {
    return !faults().no_pinned_memory && pinned(data, 1) == Pinned::whole;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(!faults().no_pinned_memory, "Backend doesn't support getPinnedMemoryAllocator()");
    return &pinned_allocator();
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const int device = device_of(data);
    TORCH_CHECK(device >= 0, "The specified pointer resides on host memory and is not registered with any ",
                c10::DeviceTypeName(kType), " device.");
    return device_at(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  c10::DeviceIndex deviceCount() const override { return faults().no_devices ? 0 : kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(pretend::current_device());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    if (device >= 0) set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
};

}  // namespace pretend
