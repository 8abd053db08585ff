// What torch has for a device, beyond the operators that compute on it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <string>

#include "accelerator/pinned_memory.h"

namespace dynswap {

/// What differs between devices. The device itself is asked, as no table of ours could know every device that
/// torch will ever have. What it does not answer for counts as absent, which is always safe.
struct Capabilities {
  /// Why torch's streams and events cannot serve the device; empty if they can. Only then are the others
  /// asked for.
  std::string obstacle;
  /// Whether there is a stream besides the default one. Else copies and operators take turns.
  bool copy_stream = false;
  /// Whether there is host memory from which copies are asynchronous. Else each waits for the one before.
  bool pinned_memory = false;
  /// Whether masters are page-locked where they lie. Else the small ones have page-locked copies, and so have
  /// the large ones as far as the host's memory goes.
  bool page_locking = false;
};

/// Asks the device. Initialises its driver.
Capabilities capabilities_of(const c10::Device& device, const HostRegister& host_register);

/// A stream for copies alone, of high priority where the device has priorities; the stream of the operators
/// where the device has no other.
c10::Stream copy_stream(const c10::Device& device);

}  // namespace dynswap
