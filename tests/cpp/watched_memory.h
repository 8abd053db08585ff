// Memory for the tests of MemoryWatch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "io/memory_watch.h"
#include "platform/memory.h"
#include "platform/page_watch.h"

namespace dynswap::test {

inline constexpr std::size_t kPage = 4096;

/// Pages of our own, filled with ones.
inline std::shared_ptr<std::byte> pages(std::size_t count) {
  void* const address = map_memory(count * kPage);
  std::memset(address, 1, count * kPage);
  return {static_cast<std::byte*>(address),
          [count](std::byte* begin) { unmap_memory(begin, count * kPage); }};
}

/// Whether this kernel watches pages. If not, the test is skipped with a message.
inline bool kernel_watches() {
  const auto memory = pages(16);
  const bool watches = PageWatch::over(pages_within(memory.get(), 16 * kPage), PageSelection::all) != nullptr;
  if (!watches) std::puts("    skipped: this kernel watches no pages (Linux 6.7 and userfaultfd are needed)");
  return watches;
}

/// Whether a first look finds a write and a second look does not count it again.
inline bool seen_once(MemoryWatch& watch, std::uint64_t& count) {
  const std::uint64_t now = watch.writes();
  return std::exchange(count, now) != now && watch.writes() == count;
}

}  // namespace dynswap::test
