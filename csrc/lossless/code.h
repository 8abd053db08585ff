// The lossless code of weights: one block.
//
// Note [The lossless code]
// Trained weights use few of their exponents: a code of 3 bits names the seven commonest of a block, or says
// that the exponent is in a list of escapes. Sign and mantissa stay as they are. The place of all but the
// escapes follows from the index of a weight. A directory has the number of escapes before each run of 256
// weights, so that a run is decoded by itself: on a processor by vectors, on a device by a warp.
// docs/lossless.md has the layout.
//
// The code divides a weight into a top, which is laid out as a bfloat16 is (a sign, 8 bits of exponent, 7 of
// mantissa), and the mantissa's other bits below: none of a bfloat16, 16 of a float32, 3 of a float16. The
// exponent of a float16 takes 5 of the 8 bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/align.h"
#include "core/scalar.h"

namespace dynswap::lossless {

inline constexpr std::size_t kBlockWeights = 4096;
inline constexpr std::size_t kRunWeights = 256;
inline constexpr std::size_t kRuns = kBlockWeights / kRunWeights;
inline constexpr std::size_t kAlignment = 16;    ///< of blocks, in bytes
inline constexpr std::size_t kHeaderBytes = 16;  ///< kind, table, number of escapes
inline constexpr std::size_t kEscapesAt = 8;     ///< in the header: their number
inline constexpr std::size_t kCodes = 8;
inline constexpr std::uint8_t kEscape = kCodes - 1;  ///< the code of an exponent that the table does not have
enum class Kind : std::uint8_t { raw, coded };

/// Whether there is a code for weights of this type.
constexpr bool codable(Scalar type) noexcept {
  return type == Scalar::bf16 || type == Scalar::f32 || type == Scalar::f16;
}

/// Where the parts of a coded block begin: bytes from the block's own begin.
struct Parts {
  std::size_t low;         ///< 16 bits a weight, of a float32
  std::size_t bytes;       ///< sign and mantissa
  std::size_t planes;      ///< of the codes' bits
  std::size_t plane;       ///< bytes of one
  std::size_t low_planes;  ///< of a float16's three low bits
  std::size_t escapes;
};

constexpr Parts parts_of(Scalar type, std::size_t weights) noexcept {
  const std::size_t padded = align_up(weights, kRunWeights);
  Parts parts{};
  parts.low = kHeaderBytes + kRuns * sizeof(std::uint16_t);
  parts.bytes = parts.low + (type == Scalar::f32 ? 2 * padded : 0);
  parts.plane = padded / 8;
  parts.planes = parts.bytes + padded;
  parts.low_planes = parts.planes + 3 * parts.plane;
  parts.escapes = parts.low_planes + (type == Scalar::f16 ? 3 * parts.plane : 0);
  return parts;
}

constexpr std::size_t raw_block_bytes(Scalar type, std::size_t weights) noexcept {
  return kHeaderBytes + align_up(weights * scalar_size(type), kAlignment);
}
/// No block has more bytes.
constexpr std::size_t most_block_bytes(Scalar type) noexcept { return raw_block_bytes(type, kBlockWeights); }

/// How a block will be coded.
struct BlockPlan {
  std::array<std::uint8_t, kCodes - 1> table{};
  Kind kind = Kind::raw;
  std::uint16_t escapes = 0;
};

/// Looks at 1 to kBlockWeights weights, which need not be aligned.
BlockPlan plan_block(Scalar type, const void* src, std::size_t weights) noexcept;
std::size_t block_bytes(Scalar type, const BlockPlan& plan, std::size_t weights) noexcept;
/// Writes block_bytes() bytes and no more. False if these are not the weights that were planned for.
bool write_block(Scalar type, const BlockPlan& plan, const void* src, std::size_t weights,
                 std::byte* dst) noexcept;
/// Plans and writes a block. Returns its bytes: a multiple of kAlignment, at most most_block_bytes(type).
std::size_t encode_block(Scalar type, const void* src, std::size_t weights, std::byte* dst) noexcept;

/// What is wrong with the header or the directory of a block of `bytes`; null if nothing is. Reads no
/// weights.
const char* check_block(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights) noexcept;

/// Which instructions decode blocks: the best that the processor has, or (for tests) those that all have.
enum class Instructions : std::uint8_t { best, portable };

/// Decodes weights [first, first + count) of a block that has `weights` in all. Nothing needs to be aligned.
/// False if the block is damaged, as far as these weights tell; what `dst` then has is unspecified. Never
/// reads outside the block's `bytes`, nor writes outside the `count` weights.
bool decode_block(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights,
                  std::size_t first, std::size_t count, void* dst,
                  Instructions instructions = Instructions::best) noexcept;

}  // namespace dynswap::lossless
