// The lossless code of a whole tensor: an index, and blocks (Note [The lossless code]).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/scalar.h"
#include "lossless/code.h"

namespace dynswap::lossless {

constexpr std::size_t blocks_of(std::size_t weights) noexcept {
  return weights / kBlockWeights + (weights % kBlockWeights != 0 ? 1 : 0);
}
/// Where the first block begins.
constexpr std::size_t index_bytes(std::size_t weights) noexcept {
  return align_up((blocks_of(weights) + 1) * sizeof(std::uint64_t), kAlignment);
}
/// The weights of one of the blocks.
constexpr std::size_t weights_in(std::size_t block, std::size_t weights) noexcept {
  const std::size_t left = weights - block * kBlockWeights;
  return left < kBlockWeights ? left : kBlockWeights;
}

/// Codes a tensor. It knows how many bytes that takes before it needs memory for them.
class Encoder {
 public:
  /// Looks at all weights, with so many threads at most. They are read again by write().
  Encoder(Scalar type, const void* src, std::size_t weights, int threads);

  std::size_t bytes() const noexcept { return offsets_.back(); }
  /// Whether at least a twentieth of the tensor's own bytes is saved.
  bool pays() const noexcept;
  /// Writes bytes(). Throws Error if the weights were changed since they were looked at.
  void write(std::byte* dst) const;

 private:
  const Scalar type_;
  const std::byte* const src_;
  const std::size_t weights_;
  const int threads_;
  std::vector<BlockPlan> plans_;
  std::vector<std::uint64_t> offsets_;
};

/// What is wrong with an index, of which `src` has index_bytes(weights), for a coded tensor of `bytes`; empty
/// if nothing is. Then each block lies within the tensor, and is no longer than a block can be.
std::string check_index(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights);
/// What is wrong with a tensor's index, or with a block's header or directory; empty if nothing is.
std::string check_tensor(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights);

/// Decodes weights [first, first + count). False if what they are decoded from is damaged.
bool decode_tensor(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights,
                   std::size_t first, std::size_t count, void* dst) noexcept;

}  // namespace dynswap::lossless
