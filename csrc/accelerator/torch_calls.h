// Calls of torch's, whose errors come out as ours.
#pragma once

#include <c10/util/Exception.h>

#include <utility>

#include "core/check.h"

namespace dynswap {

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
