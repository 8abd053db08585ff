// Element types that the engine can move and cast.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynswap {

/// `raw8` .. `raw128` are moved and never cast (integers, bool, complex); the others may be cast
/// into one another.
enum class Scalar : std::uint8_t {
  raw8,
  raw16,
  raw32,
  raw64,
  raw128,
  f64,
  f32,
  f16,
  bf16,
  f8_e4m3fn,
  f8_e5m2,
};

/// Bytes of one element.
constexpr std::size_t scalar_size(Scalar scalar) noexcept {
  switch (scalar) {
    case Scalar::raw8:
    case Scalar::f8_e4m3fn:
    case Scalar::f8_e5m2:
      return 1;
    case Scalar::raw16:
    case Scalar::f16:
    case Scalar::bf16:
      return 2;
    case Scalar::raw32:
    case Scalar::f32:
      return 4;
    case Scalar::raw64:
    case Scalar::f64:
      return 8;
    case Scalar::raw128:
      return 16;
  }
  return 0;
}

constexpr bool is_floating(Scalar scalar) noexcept { return scalar >= Scalar::f64; }

/// Casts `count` contiguous elements. Supplied by the caller of the engine (torch's own conversion
/// in the extension), so that a streamed weight is equal to `.to(dtype)` to the bit.
/// Must be thread-safe and must not start threads of its own.
using CastFn = void (*)(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count);

}  // namespace dynswap
