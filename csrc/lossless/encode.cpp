#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "lossless/code.h"
#include "lossless/load.h"

namespace dynswap::lossless {
namespace {

/// The tops of four weights of a type, and what they have below.
struct Four {
  std::uint64_t tops;
  std::uint64_t low;
};

template <Scalar kType>
Four load_four(const std::byte* src) noexcept {
  if constexpr (kType == Scalar::f32) {
    const auto two = load<std::array<std::uint64_t, 2>>(src);
    const auto upper = [](std::uint64_t pair) { return (pair >> 16 & 0xFFFF) | (pair >> 32 & 0xFFFF0000); };
    const auto lower = [](std::uint64_t pair) { return (pair & 0xFFFF) | (pair >> 16 & 0xFFFF0000); };
    return {upper(two[0]) | upper(two[1]) << 32, lower(two[0]) | lower(two[1]) << 32};
  } else {
    const auto four = load<std::uint64_t>(src);
    if constexpr (kType == Scalar::bf16) return {four, 0};
    constexpr std::uint64_t kLow = 0x0007000700070007;
    return {(four & 0x8000800080008000) | (four >> 3 & 0x0FFF0FFF0FFF0FFF), four & kLow};
  }
}

/// The lower bytes of four numbers of 16 bits.
std::uint64_t pack_four(std::uint64_t wide) noexcept {
  wide = (wide | wide >> 8) & 0x0000FFFF0000FFFF;
  return (wide | wide >> 16) & 0xFFFFFFFF;
}

std::uint8_t exponent_of(std::uint64_t tops, std::size_t of) noexcept {
  return static_cast<std::uint8_t>(tops >> (16 * of + 7));
}

template <Scalar kType>
BlockPlan plan(const std::byte* src, std::size_t weights) noexcept {
  constexpr std::size_t kSize = scalar_size(kType);
  // Neighbours often have the same exponent. With four tables, no increment waits for the one before it.
  std::array<std::array<std::uint16_t, 256>, 4> counts{};
  std::size_t i = 0;
  for (; i + 4 <= weights; i += 4) {
    const std::uint64_t tops = load_four<kType>(src + i * kSize).tops;
    for (std::size_t k = 0; k < 4; ++k) ++counts[k][exponent_of(tops, k)];
  }
  std::array<std::byte, 4 * kSize> last{};
  if (i < weights) std::memcpy(last.data(), src + i * kSize, (weights - i) * kSize);
  const std::uint64_t tops = load_four<kType>(last.data()).tops;
  for (std::size_t k = 0; i + k < weights; ++k) ++counts[k][exponent_of(tops, k)];

  BlockPlan plan;
  std::array<unsigned, kCodes - 1> most{};  // how often the table's exponents occur
  for (std::size_t exponent = 0; exponent < 256; ++exponent) {
    const unsigned count = static_cast<unsigned>(counts[0][exponent]) + counts[1][exponent] +
                           counts[2][exponent] + counts[3][exponent];
    if (count <= most.back()) continue;
    std::size_t place = most.size() - 1;
    for (; place > 0 && count > most[place - 1]; --place) {
      most[place] = most[place - 1];
      plan.table[place] = plan.table[place - 1];
    }
    most[place] = count;
    plan.table[place] = static_cast<std::uint8_t>(exponent);
  }
  std::size_t escapes = weights;
  for (const unsigned count : most) escapes -= count;
  plan.escapes = static_cast<std::uint16_t>(escapes);
  plan.kind = Kind::coded;
  if (block_bytes(kType, plan, weights) < raw_block_bytes(kType, weights)) return plan;
  return {};
}

/// By a number of 3 bits: each bit as the lowest of a byte. Those of weight i of eight, shifted by i, are its
/// bits in a byte of each plane.
constexpr std::array<std::uint32_t, kCodes> kSpread = {0,       1,       0x100,   0x101,
                                                       0x10000, 0x10001, 0x10100, 0x10101};

void write_planes(std::uint32_t bits, std::byte* dst, std::size_t plane_bytes) noexcept {
  for (std::size_t plane = 0; plane < 3; ++plane) {
    dst[plane * plane_bytes] = static_cast<std::byte>(bits >> 8 * plane);
  }
}

template <Scalar kType>
bool write_coded(const BlockPlan& plan, const std::byte* src, std::size_t weights, std::byte* dst) noexcept {
  constexpr std::size_t kSize = scalar_size(kType);
  const Parts parts = parts_of(kType, weights);
  std::array<std::uint32_t, 256> codes;
  codes.fill(kSpread[kEscape]);
  // Backwards: entries that are not used are 0, and an exponent 0 has the first of them.
  for (std::uint32_t code = kEscape; code-- > 0;) codes[plan.table[code]] = kSpread[code];
  std::size_t escapes = 0;
  std::array<std::byte, kRunWeights * kSize> padded{};
  for (std::size_t run = 0; run < kBlockWeights; run += kRunWeights) {
    store(dst + kHeaderBytes + run / kRunWeights * 2, static_cast<std::uint16_t>(escapes));
    if (run >= weights) continue;
    const std::byte* from = src + run * kSize;
    if (weights - run < kRunWeights) {
      std::memcpy(padded.data(), from, (weights - run) * kSize);
      from = padded.data();
    }
    for (std::size_t first = run; first < run + kRunWeights; first += 8, from += 8 * kSize) {
      std::uint32_t code = 0;
      std::uint32_t low3 = 0;
      std::uint64_t bytes = 0;
      std::array<std::uint64_t, 2> tops;
#pragma GCC unroll 2
      for (std::size_t half = 0; half < 2; ++half) {
        const Four four = load_four<kType>(from + 4 * half * kSize);
        tops[half] = four.tops;
#pragma GCC unroll 4
        for (std::size_t k = 0; k < 4; ++k) {
          code |= codes[exponent_of(four.tops, k)] << (4 * half + k);
          if constexpr (kType == Scalar::f16) {
            low3 |= kSpread[four.low >> 16 * k & 7] << (4 * half + k);
          }
        }
        bytes |= pack_four((four.tops & 0x007F007F007F007F) | (four.tops >> 8 & 0x0080008000800080))
                 << 32 * half;
        if constexpr (kType == Scalar::f32) store(dst + parts.low + 2 * (first + 4 * half), four.low);
      }
      if (first + 8 > weights) code &= first < weights ? ((1u << (weights - first)) - 1) * 0x010101 : 0;
      store(dst + parts.bytes + first, bytes);
      write_planes(code, dst + parts.planes + first / 8, parts.plane);
      if constexpr (kType == Scalar::f16) write_planes(low3, dst + parts.low_planes + first / 8, parts.plane);
      for (std::uint32_t left = code & code >> 8 & code >> 16; left != 0; left &= left - 1) {
        if (escapes == plan.escapes) return false;
        const auto of = static_cast<std::size_t>(std::countr_zero(left));
        dst[parts.escapes + escapes++] = std::byte{exponent_of(tops[of / 4], of % 4)};
      }
    }
  }
  return escapes == plan.escapes;
}

}  // namespace

BlockPlan plan_block(Scalar type, const void* src, std::size_t weights) noexcept {
  return with_type(
      type, [&](auto constant) { return plan<constant.value>(static_cast<const std::byte*>(src), weights); });
}

std::size_t block_bytes(Scalar type, const BlockPlan& plan, std::size_t weights) noexcept {
  if (plan.kind == Kind::raw) return raw_block_bytes(type, weights);
  return align_up(parts_of(type, weights).escapes + plan.escapes, kAlignment);
}

bool write_block(Scalar type, const BlockPlan& plan, const void* src, std::size_t weights,
                 std::byte* dst) noexcept {
  const auto* const bytes = static_cast<const std::byte*>(src);
  std::memset(dst, 0, kHeaderBytes);
  std::memset(dst + block_bytes(type, plan, weights) - kAlignment, 0, kAlignment);  // what pads it
  dst[0] = std::byte{static_cast<std::uint8_t>(plan.kind)};
  if (plan.kind == Kind::raw) {
    std::memcpy(dst + kHeaderBytes, bytes, weights * scalar_size(type));
    return true;
  }
  std::memcpy(dst + 1, plan.table.data(), plan.table.size());
  store(dst + kEscapesAt, plan.escapes);
  return with_type(type,
                   [&](auto constant) { return write_coded<constant.value>(plan, bytes, weights, dst); });
}

std::size_t encode_block(Scalar type, const void* src, std::size_t weights, std::byte* dst) noexcept {
  const BlockPlan plan = plan_block(type, src, weights);
  write_block(type, plan, src, weights, dst);
  return block_bytes(type, plan, weights);
}

}  // namespace dynswap::lossless
