// Calls of torch's: its guard for a type of device, and its errors as ours.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

#include "core/check.h"

namespace dynswap {

/// Returns torch's guard for a type of device, which makes streams and events. Throws c10::Error if there is
/// none.
inline c10::impl::VirtualGuardImpl guard_of(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

/// Runs `body`, which calls torch. Throws OutOfMemory or DeviceError with torch's words.
template <class Body>
decltype(auto) torch_calls(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const c10::OutOfMemoryError& error) {
    throw OutOfMemory(error.what_without_backtrace());
  } catch (const c10::Error& error) {
    throw DeviceError(error.what_without_backtrace());
  }
}

}  // namespace dynswap
