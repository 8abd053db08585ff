// Where the elements of a tensor lie in memory, gaps included.
#pragma once

#include <cstddef>
#include <vector>

namespace dynswap {

/// Runs of bytes without a gap, and how they repeat. Immutable.
struct Elements {
  struct Repeat {
    std::size_t count = 0;
    std::size_t stride = 0;  ///< bytes
  };

  const std::byte* address = nullptr;
  std::size_t bytes = 0;          ///< from the first byte to behind the last one
  std::size_t run = 0;            ///< bytes that follow one another
  std::vector<Repeat> repeats{};  ///< of the run, by falling stride; none: there is one

  bool has_gaps() const noexcept { return !repeats.empty(); }
  const std::byte* end() const noexcept { return address + bytes; }
};

/// One run without a gap.
inline Elements dense_elements(const void* address, std::size_t bytes) {
  return {static_cast<const std::byte*>(address), bytes, bytes, {}};
}

/// False if no byte is an element's of both. True may be wrong for patterns whose strides have little in
/// common.
bool may_overlap(const Elements& a, const Elements& b) noexcept;

/// Calls `use(address)` for each run, relative to `begin` in place of the elements' own address.
template <class Use>
void for_each_run(const Elements& elements, const std::byte* begin, const Use& use, std::size_t depth = 0) {
  if (depth == elements.repeats.size()) return use(begin);
  const auto [count, stride] = elements.repeats[depth];
  for (std::size_t i = 0; i < count; ++i) for_each_run(elements, begin + i * stride, use, depth + 1);
}

}  // namespace dynswap
