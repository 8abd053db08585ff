// Decoding on the device: Note [The lossless code] in lossless/code.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/scalar.h"

namespace dynswap {

/// Whole blocks of a coded tensor, one after the other, in device memory.
struct CodedBlocks {
  const std::byte* coded = nullptr;      ///< the first block; 256-byte aligned
  const std::uint64_t* index = nullptr;  ///< where each begins, and the last ends; `coded` is at index[0]
  std::size_t blocks = 0;
  std::size_t weights = 0;  ///< in all of them
};

/// Enqueues on `stream` the decoding of weights [first, first + count) of the blocks, of type `stored`, and
/// their cast to `dst_type`, for which device_casts_to() (transfer/copy_plan.h) is true. The index is sound
/// (check_index() in lossless/tensor.h). Damaged blocks give any weights, and nothing is read outside the
/// blocks, nor written outside `dst`. Returns what the launch returned.
cudaError_t launch_decode(void* dst, Scalar dst_type, const CodedBlocks& from, Scalar stored,
                          std::size_t first, std::size_t count, cudaStream_t stream) noexcept;

}  // namespace dynswap
