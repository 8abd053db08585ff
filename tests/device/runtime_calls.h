// How the calls of the pretend CUDA runtime answer. No CUDA header is needed: an error is a number.
//
// What the real runtime forbids, and would not always notice, is a violation: a call without a context, a
// call in a host function.
#pragma once

#include <string>

#include "machine.h"

#define EXPORT __attribute__((visibility("default")))

namespace pretend {

constexpr int kAssertFailed = 710,
              kUnsupportedInCapture = 900;  // cudaErrorAssert, ...StreamCaptureUnsupported

/// Of the calling thread; 0 is none.
int& last_runtime_error() noexcept;

inline int fail(int error) { return last_runtime_error() = error; }

/// Runs the body of a call, whose faults are its answer. Every call has to keep to the rules.
template <class Body>
int call(const char* name, Body body) {
  note_call();
  if (on_device_thread()) violate(std::string(name) + " in a host function");
  if (contexts().empty()) violate(std::string(name) + " without a context");
  try {
    if (!sticky_error().empty()) return fail(kAssertFailed);
    return body();
  } catch (const DeviceFault& fault) {
    return fail(fault.code);
  }
}

/// Waits for whatever may still read the memory, on any stream of any device (Faults::unpinning_waits).
inline void wait_before_unpinning(const char* name) {
  if (!faults().unpinning_waits) return;
  for (int device = 0; device < kDevices; ++device) synchronise_device(device, name);
}

/// Such a call could synchronise, so a capture in global mode forbids it.
template <class Body>
int unsafe_call(const char* name, Body body) {
  if (capture_forbids(name)) return fail(kUnsupportedInCapture);
  return call(name, body);
}

}  // namespace pretend
