// What the engine needs of torch, in the engine's terms.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <string>

#include "core/backend.h"
#include "core/scalar.h"

namespace dynswap {

/// The engine's element type, or nothing if it cannot move such elements (quantised, sub-byte).
std::optional<Scalar> scalar_of(at::ScalarType type) noexcept;

/// Whether the engine can move such elements, and cast them where the two differ. It cannot cast all of
/// torch's floating types (float8_e4m3fnuz and others are raw8 to it): torch converts those masters.
bool can_move(at::ScalarType stored, at::ScalarType wanted) noexcept;

/// torch's own conversion, so that what is streamed equals `.to(dtype)` to the bit. A CastFn.
void cast_elements(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count);

/// The calling thread's current stream on an accelerator, as torch knows it. Must be read on the consumer's
/// own thread, outside any guard of ours (Invariant 2). Asks the device's guard, which torch has for each
/// accelerator, so that one build serves CPU-only torch as well.
c10::Stream torch_stream(const at::Device& device);

/// A stream of torch's as the engine knows it: its number, which no other stream of the device has.
Stream handle_of(const c10::Stream& stream);

/// The driver's handle of a stream that the engine knows.
Stream native_handle(const at::Device& device, Stream stream);

/// torch_stream() as the engine knows it; 0 on the CPU.
Stream current_stream(const at::Device& device);

/// Whether what the calling thread's current stream is given goes into a CUDA graph; false on the CPU.
bool capturing(const at::Device& device);

/// Throws DeviceError if the calling thread is capturing a CUDA graph: a replay would read what has come into
/// the slot since. Residents stay where they are, and can be captured once they are there.
void refuse_capture(const at::Device& device, const std::string& weight, bool resident);
/// Throws DeviceError if the calling thread is capturing a CUDA graph: a buffer whose bytes are compared when
/// the call ends cannot be captured.
void refuse_capture_of_written(const at::Device& device, const std::string& buffer);

/// Device memory through torch's allocator, so that its statistics and its handling of an exhausted
/// device stay true. Throws OutOfMemory.
Memory allocate_through_torch(const at::Device& device, std::size_t bytes);

}  // namespace dynswap
