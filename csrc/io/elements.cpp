#include "io/elements.h"

#include <cstdint>
#include <numeric>

namespace dynswap {

bool may_overlap(const Elements& a, const Elements& b) noexcept {
  if (a.bytes == 0 || b.bytes == 0 || a.end() <= b.address || b.end() <= a.address) return false;
  // All runs of either begin at its address and multiples of `step` from there.
  std::uintptr_t step = 0;
  for (const Elements* const of : {&a, &b}) {
    for (const Elements::Repeat& repeat : of->repeats) step = std::gcd(step, repeat.stride);
  }
  if (step == 0) return true;
  const auto from_a = reinterpret_cast<std::uintptr_t>(a.address) % step;
  const auto from_b = reinterpret_cast<std::uintptr_t>(b.address) % step;
  const std::uintptr_t b_after_a = (from_b + step - from_a) % step;
  return b_after_a < a.run || step - b_after_a < b.run;
}

}  // namespace dynswap
