// Conversions between floating point types, by integer arithmetic: the same code and the same bits on the
// host, where they are compared with torch's exhaustively, and in the kernels.
//
// Rounding is to nearest, ties to even; what is too large becomes infinite. A double goes to the small
// types by way of float, as torch's does. A NaN stays a NaN, but which one is not promised: torch itself
// gives different ones on the CPU (scalar, vectorised) and on the GPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DYNSWAP_BOTH __host__ __device__ inline
#else
#define DYNSWAP_BOTH inline
#endif

namespace dynswap {

struct F16 {
  std::uint16_t bits;
};
struct BF16 {
  std::uint16_t bits;
};
struct F8E4M3FN {
  std::uint8_t bits;
};
struct F8E5M2 {
  std::uint8_t bits;
};

/// A small format of `kExponent` exponent and `kMantissa` mantissa bits below a sign bit, with subnormals,
/// and IEEE infinities and NaNs if `kIeee`, else with all exponents finite but for one NaN.
template <int kExponent, int kMantissa, bool kIeee>
struct SmallFloat {
  static constexpr std::uint32_t kBias = (1u << (kExponent - 1)) - 1;
  static constexpr int kDropped = 23 - kMantissa;  ///< mantissa bits that float has more
  static constexpr std::uint32_t kSignShift = 31 - (kExponent + kMantissa);
  static constexpr std::uint32_t kMagnitude = (1u << (kExponent + kMantissa)) - 1;
  static constexpr std::uint32_t kInfinity = ((1u << kExponent) - 1) << kMantissa;  ///< IEEE only

  DYNSWAP_BOTH static float widen(std::uint32_t bits) {
    const std::uint32_t sign = (bits & ~kMagnitude) << kSignShift;
    const std::uint32_t magnitude = bits & kMagnitude;
    if (magnitude < (1u << kMantissa)) {  // zero or subnormal: mantissa * 2^(1 - bias - kMantissa), exact
      const float unit = __builtin_bit_cast(float, (127 + 1 - kBias - kMantissa) << 23);
      const float value = static_cast<float>(magnitude) * unit;
      return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, value) | sign);
    }
    if (kIeee ? magnitude >= kInfinity : magnitude == kMagnitude) {
      const std::uint32_t mantissa = (magnitude & ((1u << kMantissa) - 1)) << kDropped;
      return __builtin_bit_cast(float, sign | 0x7F800000u | mantissa);
    }
    return __builtin_bit_cast(float, sign | ((magnitude << kDropped) + ((127 - kBias) << 23)));
  }

  DYNSWAP_BOTH static std::uint32_t narrow(float value) {
    static_assert(kIeee, "see Note [Where a weight is cast]");
    const std::uint32_t all = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t sign = (all >> kSignShift) & ~kMagnitude;
    const std::uint32_t magnitude = all & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {  // quiet, with the upper bits of the payload
      return sign | kInfinity | (1u << (kMantissa - 1)) | ((magnitude & 0x7FFFFFu) >> kDropped);
    }
    constexpr std::uint32_t kSmallestNormal = (127 + 1 - kBias) << 23;
    if (kBias != 127 && magnitude < kSmallestNormal) {
      // The sum's last mantissa bit is worth the smallest subnormal, so the addition rounds.
      constexpr std::uint32_t kShift = (127 + 1 - kBias + kDropped) << 23;
      const float sum = __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, kShift);
      return sign | (__builtin_bit_cast(std::uint32_t, sum) - kShift);
    }
    const std::uint32_t odd = (magnitude >> kDropped) & 1u;
    const std::uint32_t rounded = (magnitude + (((1u << kDropped) - 1) >> 1) + odd) >> kDropped;
    const std::uint32_t result = rounded - ((127 - kBias) << kMantissa);
    return sign | (result < kInfinity ? result : kInfinity);
  }
};

DYNSWAP_BOTH float to_float(double value) { return static_cast<float>(value); }
DYNSWAP_BOTH float to_float(float value) { return value; }
DYNSWAP_BOTH float to_float(F16 value) { return SmallFloat<5, 10, true>::widen(value.bits); }
DYNSWAP_BOTH float to_float(BF16 value) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(value.bits) << 16);
}
DYNSWAP_BOTH float to_float(F8E4M3FN value) { return SmallFloat<4, 3, false>::widen(value.bits); }
DYNSWAP_BOTH float to_float(F8E5M2 value) { return SmallFloat<5, 2, true>::widen(value.bits); }

DYNSWAP_BOTH void from_float(float value, double& result) { result = value; }
DYNSWAP_BOTH void from_float(float value, float& result) { result = value; }
DYNSWAP_BOTH void from_float(float value, F16& result) {
  result.bits = static_cast<std::uint16_t>(SmallFloat<5, 10, true>::narrow(value));
}
DYNSWAP_BOTH void from_float(float value, BF16& result) {
  result.bits = static_cast<std::uint16_t>(SmallFloat<8, 7, true>::narrow(value));
}
DYNSWAP_BOTH void from_float(float value, F8E5M2& result) {
  result.bits = static_cast<std::uint8_t>(SmallFloat<5, 2, true>::narrow(value));
}

/// Every pair goes by way of float: it holds each type but double exactly, and torch narrows a double so.
template <class To, class From>
DYNSWAP_BOTH To convert(From value) {
  To result;
  from_float(to_float(value), result);
  return result;
}

}  // namespace dynswap
