// Coded weights decoded by torch's operations, on accelerators for which there is no kernel of ours.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

#include "core/scalar.h"

namespace dynswap {

/// Blocks of one tensor that follow each other, on a device (docs/lossless.md).
struct BlocksOnDevice {
  at::Tensor bytes;      ///< uint8, one dimension
  at::Tensor index;      ///< uint8: where each begins, and the last one ends, as in the tensor's index
  std::int64_t weights;  ///< of all of them
};

/// Enqueues the decoding on the current stream. Waits for nothing, so that bytes that are no code give any
/// values. Returns all weights, in one dimension. Of each weight, some 40 bytes are taken meanwhile. Runs
/// under PlainTorch; throws c10::Error, if the device lacks an operation.
at::Tensor decoded(const BlocksOnDevice& blocks, Scalar type);

/// Whether the device has these operations, and they decode as the code is meant. Tries it, and waits.
bool decodes(const c10::Device& device) noexcept;

}  // namespace dynswap
