#include "platform/memory.h"

#include <algorithm>

namespace dynswap {

Pages pages_within(const void* address, std::size_t bytes) noexcept {
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t begin = (first + page_size() - 1) / page_size() * page_size();
  const std::uintptr_t end = (first + bytes) / page_size() * page_size();
  return {begin, std::max(begin, end)};
}

Pages pages_around(const void* address, std::size_t bytes) noexcept {
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  return {first / page_size() * page_size(), (first + bytes + page_size() - 1) / page_size() * page_size()};
}

}  // namespace dynswap
