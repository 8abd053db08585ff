#include "accelerator/capabilities.h"

#include <c10/core/Event.h>

#include <exception>

#include "accelerator/torch_calls.h"

namespace dynswap {
namespace {

/// Why an event cannot order two streams of the device; empty if it can.
std::string obstacle_of(const c10::Device& device) {
  if (device.type() == c10::kMPS) return "memory there has no addresses";  // it has Metal buffers
  try {
    const auto guard = guard_of(device);
    const int count = guard.deviceCount();
    if (device.index() >= count) return "torch finds " + std::to_string(count) + " devices of this type";
    c10::Event event(device.type());
    event.record(guard.getStream(device));
    event.block(copy_stream(device));
    (void)event.query();
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

c10::Stream copy_stream(const c10::Device& device) {
  try {
    return guard_of(device).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  } catch (const c10::Error&) {
    return guard_of(device).getDefaultStream(device);
  }
}

Capabilities capabilities_of(const c10::Device& device, const HostRegister& host_register) {
  Capabilities found;
  found.obstacle = obstacle_of(device);
  if (!found.obstacle.empty()) return found;
  found.copy_stream = copy_stream(device) != guard_of(device).getDefaultStream(device);
  found.pinned_memory = has_pinned_memory(device);
  found.page_locking = found.pinned_memory && host_register != nullptr;
  return found;
}

}  // namespace dynswap
