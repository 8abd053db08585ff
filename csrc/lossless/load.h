// Numbers that need not be aligned, and types as constants.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "core/scalar.h"

namespace dynswap::lossless {

static_assert(std::endian::native == std::endian::little,
              "the layout is little-endian, and these do not swap");

template <class T>
T load(const std::byte* src) noexcept {
  T value;
  std::memcpy(&value, src, sizeof(T));
  return value;
}

template <class T>
void store(std::byte* dst, T value) noexcept {
  std::memcpy(dst, &value, sizeof(T));
}

/// Calls `use` with a codable type as a constant.
template <class Use>
auto with_type(Scalar type, const Use& use) noexcept {
  if (type == Scalar::f32) return use(std::integral_constant<Scalar, Scalar::f32>());
  if (type == Scalar::f16) return use(std::integral_constant<Scalar, Scalar::f16>());
  return use(std::integral_constant<Scalar, Scalar::bf16>());
}

}  // namespace dynswap::lossless
