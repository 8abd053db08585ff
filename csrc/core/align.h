// Multiples of an alignment.
#pragma once

#include <cstddef>

namespace dynswap {

constexpr std::size_t align_down(std::size_t value, std::size_t alignment) noexcept {
  return value / alignment * alignment;
}

constexpr std::size_t align_up(std::size_t value, std::size_t alignment) noexcept {
  return align_down(value + alignment - 1, alignment);
}

}  // namespace dynswap
