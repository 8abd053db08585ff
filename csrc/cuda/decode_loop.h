// What the lanes of a warp do that decodes a run of 256 weights: the same code on the host, where tests run
// it lane by lane, and on the device.
//
// Each lane has eight weights that follow one another: it loads 8 bytes of signs and mantissas and a byte of
// each plane of bits, and stores up to 16 bytes at a time. It looks up four exponents with one permutation of
// bytes. The block's directory, and the number of escapes of the lanes below, tell which escapes are its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/cast_loop.h"
#include "cuda/convert.h"
#include "cuda/decode_kernels.h"
#include "lossless/code.h"

namespace dynswap {

constexpr unsigned kLanes = 32;
constexpr unsigned kLaneWeights = lossless::kRunWeights / kLanes;

/// What a launch decodes, as the kernel takes it.
struct Decoding : CodedBlocks {
  Decoding(const CodedBlocks& from, Scalar stored, std::size_t first_weight, std::size_t wanted) noexcept
      : CodedBlocks(from),
        first(first_weight),
        count(wanted),
        full(lossless::parts_of(stored, lossless::kBlockWeights)),
        last(lossless::parts_of(stored, weights - (blocks - 1) * lossless::kBlockWeights)) {}

  std::size_t first;
  std::size_t count;
  lossless::Parts full;  ///< of each block but the last
  lossless::Parts last;
};

/// Four of the eight bytes of `low` and `high`, which four numbers of 4 bits name, each less than 8.
DYNSWAP_BOTH std::uint32_t permute(std::uint32_t low, std::uint32_t high, std::uint32_t numbers) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, numbers);
#else
  const std::uint64_t all = low | std::uint64_t{high} << 32;
  std::uint32_t bytes = 0;
  for (unsigned i = 0; i < 4; ++i) bytes |= (all >> 8 * (numbers >> 4 * i & 7) & 0xFF) << 8 * i;
  return bytes;
#endif
}

/// The bits of a byte, each the lowest of 4.
DYNSWAP_BOTH std::uint32_t spread_bits(std::uint32_t byte) {
  byte = (byte | byte << 12) & 0x000F000F;
  byte = (byte | byte << 6) & 0x03030303;
  return (byte | byte << 3) & 0x11111111;
}

/// The 3-bit numbers of a lane's weights, each in 4 bits, from three planes; `all` gets the bits that are set
/// in all planes.
DYNSWAP_BOTH std::uint32_t numbers_of(const std::byte* planes, std::size_t plane, std::uint32_t& all) {
  const auto bits0 = static_cast<std::uint32_t>(planes[0]);
  const auto bits1 = static_cast<std::uint32_t>(planes[plane]);
  const auto bits2 = static_cast<std::uint32_t>(planes[2 * plane]);
  all = bits0 & bits1 & bits2;
  return spread_bits(bits0) | spread_bits(bits1) << 1 | spread_bits(bits2) << 2;
}

DYNSWAP_BOTH std::uint32_t count_bits(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return static_cast<std::uint32_t>(__popc(bits));
#else
  return static_cast<std::uint32_t>(__builtin_popcount(bits));
#endif
}

/// One lane's weights. `From` is their type: BF16, F16 or float.
template <class From>
class DecodingLane {
 public:
  static constexpr bool kF32 = sizeof(From) == 4;
  static constexpr bool kF16 = std::is_same<From, F16>::value;
  static constexpr unsigned kWords = kLaneWeights * sizeof(From) / sizeof(std::uint32_t);

  /// Loads all but the escapes. The weights of a block that is too short are zeros.
  DYNSWAP_BOTH DecodingLane(const Decoding& from, std::size_t run, unsigned lane)
      : first_(run * lossless::kRunWeights + lane * kLaneWeights) {
    const std::size_t block = run / lossless::kRuns;
    block_ = from.coded + (from.index[block] - from.index[0]);
    bytes_ = from.index[block + 1] - from.index[block];
    const bool is_last = block + 1 == from.blocks;
    const lossless::Parts& parts = is_last ? from.last : from.full;
    const std::size_t left = from.weights - block * lossless::kBlockWeights;
    const std::size_t weights = left < lossless::kBlockWeights ? left : lossless::kBlockWeights;
    const std::size_t at = first_ % lossless::kBlockWeights;
    const auto header = *reinterpret_cast<const std::uint64_t*>(block_);
    if ((header & 0xFF) == static_cast<std::uint64_t>(lossless::Kind::coded)) {
      if (bytes_ < parts.escapes) return;
      const auto halves = *reinterpret_cast<const CastRun<std::uint32_t, 2>*>(block_ + parts.bytes + at);
      const std::uint32_t codes = numbers_of(block_ + parts.planes + at / 8, parts.plane, escapes_);
      const auto low = static_cast<std::uint32_t>(header >> 8),
                 high = static_cast<std::uint32_t>(header >> 40);
      for (unsigned i = 0; i < 2; ++i) {
        signs_and_mantissas_[i] = halves.elements[i];
        exponents_[i] = permute(low, high, codes >> 16 * i & 0xFFFF);
      }
      if (kF32) load_words(block_ + parts.low + 2 * at, kLaneWeights / 2);
      std::uint32_t unused;
      if (kF16) words_[0] = numbers_of(block_ + parts.low_planes + at / 8, parts.plane, unused);
      coded_ = true;
      const auto rank = *reinterpret_cast<const std::uint16_t*>(
          block_ + lossless::kHeaderBytes + at / lossless::kRunWeights * sizeof(std::uint16_t));
      next_escape_ = parts.escapes + rank;
    } else if (bytes_ >= lossless::kHeaderBytes + weights * sizeof(From) && at < weights) {
      const std::size_t words =
          ((weights - at) * sizeof(From) + 15) / 16 * 4;  // 16 bytes pad a block, no more
      load_words(block_ + lossless::kHeaderBytes + at * sizeof(From), words < kWords ? words : kWords);
    }
  }

  /// How many escapes its weights have.
  DYNSWAP_BOTH std::uint32_t escapes() const { return count_bits(escapes_); }

  /// Stores those of the weights that are wanted. `before`: the escapes of the lanes below.
  template <class To>
  DYNSWAP_BOTH void store(const Decoding& from, std::uint32_t before, To* __restrict__ dst) {
    if (first_ + kLaneWeights <= from.first || first_ >= from.first + from.count) return;
    if (coded_) assemble(before);
    constexpr int kPiece = static_cast<int>(sizeof(To) == 1 ? kLaneWeights : 16 / sizeof(To));
    CastRun<To, kPiece> pieces[kLaneWeights / kPiece];
    for (unsigned i = 0; i < kLaneWeights; ++i) {
      const From weight = weight_at(i);
      if constexpr (std::is_same<To, From>::value) {  // to the bit, which a NaN would not be by way of float
        pieces[i / kPiece].elements[i % kPiece] = weight;
      } else {
        pieces[i / kPiece].elements[i % kPiece] = convert<To>(weight);
      }
    }
    // Where `dst` has the lane's first weight, which may be before its begin.
    const auto address = reinterpret_cast<std::uintptr_t>(dst) + (first_ - from.first) * sizeof(To);
    if (first_ >= from.first && first_ + kLaneWeights <= from.first + from.count &&
        address % sizeof(pieces[0]) == 0) {
      for (unsigned i = 0; i < kLaneWeights / kPiece; ++i) {
        reinterpret_cast<CastRun<To, kPiece>*>(address)[i] = pieces[i];
      }
      return;
    }
    for (unsigned i = 0; i < kLaneWeights; ++i) {
      const std::size_t weight = first_ + i;
      if (weight < from.first || weight >= from.first + from.count) continue;
      dst[weight - from.first] = pieces[i / kPiece].elements[i % kPiece];
    }
  }

 private:
  DYNSWAP_BOTH void load_words(const std::byte* from, std::size_t words) {
    for (unsigned i = 0; i < kWords; i += 4) {
      if (i >= words) break;
      const auto four = reinterpret_cast<const CastRun<std::uint32_t, 4>*>(from)[i / 4];
      for (unsigned k = 0; k < 4; ++k) words_[i + k] = four.elements[k];
    }
  }

  /// Makes words_ the weights as they are in memory.
  DYNSWAP_BOTH void assemble(std::uint32_t before) {
    std::size_t escape = next_escape_ + before;
    for (std::uint32_t left = escapes_; left != 0; left &= left - 1, ++escape) {
      const std::uint32_t of = count_bits((left & (~left + 1)) - 1);
      const std::size_t at = escape < bytes_ ? escape : bytes_ - 1;
      const std::uint32_t exponent = static_cast<std::uint32_t>(block_[at]) << 8 * (of % 4);
      exponents_[0] |= of < 4 ? exponent : 0;
      exponents_[1] |= of < 4 ? 0 : exponent;
    }
    std::uint32_t tops[4];  // of two weights each
    for (unsigned pair = 0; pair < 4; ++pair) {
      const std::uint32_t bytes = signs_and_mantissas_[pair / 2];
      const std::uint32_t rest =
          permute(bytes << 1 & 0xFEFEFEFE, exponents_[pair / 2], pair % 2 == 0 ? 0x5140 : 0x7362);
      tops[pair] = permute(bytes & 0x80808080, 0, pair % 2 == 0 ? 0x1404 : 0x3424);
      if (kF16) {
        const std::uint32_t low = words_[0] >> 8 * pair;
        tops[pair] |= (rest << 2 & 0xFFF8FFF8) | (low & 7) | (low & 0x70) << 12;
      } else {
        tops[pair] |= rest >> 1 & 0x7FFF7FFF;
      }
    }
    for (unsigned i = 4; i-- > 0;) {  // backwards: the low halves are in the first words
      if constexpr (kF32) {
        const std::uint32_t low = words_[i];
        words_[2 * i] = tops[i] << 16 | (low & 0xFFFF);
        words_[2 * i + 1] = (tops[i] & 0xFFFF0000) | low >> 16;
      } else {
        words_[i] = tops[i];
      }
    }
  }

  DYNSWAP_BOTH From weight_at(unsigned i) const {
    if constexpr (kF32) {
      return __builtin_bit_cast(float, words_[i]);
    } else {
      return From{static_cast<std::uint16_t>(words_[i / 2] >> 16 * (i % 2))};
    }
  }

  std::size_t first_;  ///< of all weights
  const std::byte* block_;
  std::size_t bytes_;  ///< of the block
  bool coded_ = false;
  std::uint32_t escapes_ = 0;  ///< a bit for each weight that has one
  std::size_t next_escape_ = 0;
  std::uint32_t signs_and_mantissas_[2] = {};
  std::uint32_t exponents_[2] = {};
  /// The weights as in memory; before they are assembled, what is below tops.
  std::uint32_t words_[kWords] = {};
};

/// The runs that a launch decodes: [first, last).
DYNSWAP_BOTH std::size_t first_run(const Decoding& of) { return of.first / lossless::kRunWeights; }
DYNSWAP_BOTH std::size_t last_run(const Decoding& of) {
  return (of.first + of.count + lossless::kRunWeights - 1) / lossless::kRunWeights;
}

#ifndef __CUDA_ARCH__
/// Decodes a warp's runs, lane after lane.
template <class To, class From>
void decode_on_host(To* dst, const Decoding& from, std::size_t warp, std::size_t warps) {
  for (std::size_t run = first_run(from) + warp; run < last_run(from); run += warps) {
    std::uint32_t before = 0;
    for (unsigned i = 0; i < kLanes; ++i) {
      DecodingLane<From> lane(from, run, i);
      const std::uint32_t escapes = lane.escapes();
      lane.template store<To>(from, before, dst);
      before += escapes;
    }
  }
}
#endif

}  // namespace dynswap
