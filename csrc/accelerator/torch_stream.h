// Streams as torch knows them, in the engine's terms.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "core/backend.h"

namespace dynswap {

/// The calling thread's current stream on an accelerator, as torch knows it. Must be read on the consumer's
/// own thread, outside any guard of ours (Invariant 2). Asks the device's guard, which torch has for each
/// accelerator, so that one build serves CPU-only torch as well.
c10::Stream torch_stream(const c10::Device& device);

/// A stream of torch's as the engine knows it: its number, which no other stream of the device has.
Stream handle_of(const c10::Stream& stream);

/// The driver's handle of a stream that the engine knows.
Stream native_handle(const c10::Device& device, Stream stream);

/// torch_stream() as the engine knows it; 0 on the CPU.
Stream current_stream(const c10::Device& device);

/// Whether what the calling thread's current stream is given goes into a CUDA graph; false on the CPU.
bool capturing(const c10::Device& device);

}  // namespace dynswap
