#include "io/private_pages.h"

#include <algorithm>
#include <cstdint>

#include "platform/pagemap.h"

namespace dynswap {

std::vector<ByteRange> private_ranges(const void* address, std::size_t bytes) {
  std::vector<ByteRange> ranges;
  if (bytes == 0) return ranges;
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const bool told = find_private(pages_around(address, bytes), [&](Pages pages) {
    const ByteRange range{std::max(pages.begin, begin) - begin, std::min(pages.end, begin + bytes) - begin};
    if (!ranges.empty() && ranges.back().end == range.begin) {
      ranges.back().end = range.end;
    } else {
      ranges.push_back(range);
    }
  });
  if (!told) return {{0, bytes}};
  return ranges;
}

}  // namespace dynswap
