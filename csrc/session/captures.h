// What cannot be read while a CUDA graph is captured.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace dynswap {

/// Throws DeviceError if the calling thread is capturing a CUDA graph: a replay would read what has come into
/// the slot since. Residents stay where they are, and can be captured once they are there.
void refuse_capture(const c10::Device& device, const std::string& weight, bool resident);
/// Throws DeviceError if the calling thread is capturing a CUDA graph: a buffer whose bytes are compared when
/// the call ends cannot be captured.
void refuse_capture_of_written(const c10::Device& device, const std::string& buffer);

}  // namespace dynswap
