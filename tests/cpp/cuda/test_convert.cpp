// The conversions against arithmetic: every 16-bit and 8-bit value, and around every point where rounding
// changes.
#include "cuda/convert.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "check.h"

namespace {

using namespace dynswap;

/// The value of a small float by its definition.
double value_of(std::uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const double magnitude = exponent == 0
                               ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                               : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  return (bits >> (exponent_bits + mantissa_bits)) & 1 ? -magnitude : magnitude;
}

template <class Small>
void check_widening(int exponent_bits, int mantissa_bits, std::uint32_t infinity, std::uint32_t largest) {
  const std::uint32_t sign = 1u << (exponent_bits + mantissa_bits);
  for (std::uint32_t bits = 0; bits < 2 * sign; ++bits) {
    const float wide = to_float(Small{static_cast<decltype(Small::bits)>(bits)});
    const std::uint32_t magnitude = bits & (sign - 1);
    if (magnitude <= largest) {
      EXPECT(static_cast<double>(wide) == value_of(bits, exponent_bits, mantissa_bits));
      EXPECT_EQ(std::signbit(wide), (bits & sign) != 0);
    } else if (magnitude == infinity) {
      EXPECT(std::isinf(wide) && std::signbit(wide) == ((bits & sign) != 0));
    } else {
      EXPECT(std::isnan(wide));
    }
  }
}

template <class Small>
std::uint32_t narrowed(double value) {
  return convert<Small>(value).bits;
}

/// Between two neighbours: the nearer, and of two as near the one whose last bit is 0.
template <class Small>
void check_narrowing(int exponent_bits, int mantissa_bits) {
  const std::uint32_t sign = 1u << (exponent_bits + mantissa_bits);
  const std::uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  for (std::uint32_t low = 0; low < infinity; ++low) {
    // what would come after the largest stands in for infinity
    const double a = value_of(low, exponent_bits, mantissa_bits);
    const double b = low + 1 == infinity ? 2 * a - value_of(low - 1, exponent_bits, mantissa_bits)
                                         : value_of(low + 1, exponent_bits, mantissa_bits);
    const auto middle = static_cast<float>((a + b) / 2);
    const std::uint32_t even = low % 2 == 0 ? low : low + 1;
    EXPECT_EQ(narrowed<Small>(a), low);
    EXPECT_EQ(narrowed<Small>(-a), low | sign);
    EXPECT_EQ(narrowed<Small>(middle), even);
    EXPECT_EQ(narrowed<Small>(-middle), even | sign);
    EXPECT_EQ(narrowed<Small>(std::nextafter(middle, 0.0f)), low);
    EXPECT_EQ(narrowed<Small>(std::nextafter(middle, std::numeric_limits<float>::infinity())), low + 1);
  }
  EXPECT_EQ(narrowed<Small>(std::numeric_limits<double>::infinity()), infinity);
  EXPECT_EQ(narrowed<Small>(-std::numeric_limits<double>::max()), infinity | sign);
  const std::uint32_t nan = narrowed<Small>(std::numeric_limits<double>::quiet_NaN()) & (sign - 1);
  EXPECT(nan > infinity);
}

TEST(every_f16_is_widened_exactly) { check_widening<F16>(5, 10, 0x7C00, 0x7BFF); }
TEST(every_bf16_is_widened_exactly) { check_widening<BF16>(8, 7, 0x7F80, 0x7F7F); }
TEST(every_f8_e5m2_is_widened_exactly) { check_widening<F8E5M2>(5, 2, 0x7C, 0x7B); }
TEST(every_f8_e4m3fn_is_widened_exactly) { check_widening<F8E4M3FN>(4, 3, ~0u, 0x7E); }

TEST(narrowing_to_f16_rounds_to_even) { check_narrowing<F16>(5, 10); }
TEST(narrowing_to_bf16_rounds_to_even) { check_narrowing<BF16>(8, 7); }
TEST(narrowing_to_f8_e5m2_rounds_to_even) { check_narrowing<F8E5M2>(5, 2); }

TEST(a_double_is_narrowed_by_way_of_float) {
  // just above the middle of two halves, but a tie once it is a float
  const double value = 1.0 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40);
  EXPECT_EQ(narrowed<F16>(value), 0x3C00u);
}

}  // namespace
