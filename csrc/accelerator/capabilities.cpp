#include "accelerator/capabilities.h"

#include <c10/core/Event.h>

#include <exception>
#include <optional>

#include "accelerator/torch_calls.h"

namespace dynswap {
namespace {

/// A stream of torch's pool. A device with one stream has no pool, or gives out its default stream; others,
/// Intel's for instance, have no default stream.
std::optional<c10::Stream> pool_stream(const c10::Device& device) {
  const auto guard = guard_of(device);
  std::optional<c10::Stream> stream;
  try {
    stream = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    if (*stream == guard.getDefaultStream(device)) return std::nullopt;
  } catch (const c10::Error&) {
    // there is no pool, or no default stream
  }
  return stream;
}

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
  return pool_stream(device).value_or(guard_of(device).getStream(device));
}

Capabilities capabilities_of(const c10::Device& device, const HostRegister& host_register) {
  Capabilities found;
  found.obstacle = obstacle_of(device);
  if (!found.obstacle.empty()) return found;
  found.copy_stream = pool_stream(device).has_value();
  found.pinned_memory = has_pinned_memory(device);
  found.page_locking = found.pinned_memory && host_register != nullptr;
  return found;
}

}  // namespace dynswap
