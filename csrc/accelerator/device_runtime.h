// Calls of the CUDA or HIP runtime in this process for which torch has none of its own.
#pragma once

#include <c10/core/Stream.h>

namespace dynswap {

inline constexpr int kRelaxedCapture = 2;  ///< cudaStreamCaptureModeRelaxed, hipStreamCaptureModeRelaxed

/// Replaces the calling thread's capture mode, and returns the one before: see Note [Somebody captures a
/// graph]. Has no effect where the process has no CUDA or HIP runtime.
int exchange_capture_mode(int mode) noexcept;

/// Whether work on the stream is captured in a graph. Also of the default stream while another is captured
/// that it would have to wait for. False for devices that capture nothing.
bool is_captured(const c10::Stream& stream);

/// Clears the calling thread's last error, which the next, innocent call would report. After a call through
/// torch that has failed and told so.
void forget_last_error() noexcept;

}  // namespace dynswap
