// What the kernel knows of the pages of this process (/proc/self/pagemap).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

namespace dynswap {

/// [begin, end), addresses of whole pages.
struct Pages {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

std::size_t page_size() noexcept;

/// The pages that lie wholly within the bytes; empty (begin == end) if there are none.
Pages pages_within(const void* address, std::size_t bytes) noexcept;
/// The pages on which the bytes lie.
Pages pages_around(const void* address, std::size_t bytes) noexcept;

using OnPages = std::function<void(Pages)>;

/// Calls `on_pages` for the pages that this process has for itself: present or swapped out, and not of a
/// file. False if the kernel does not say (no /proc); `on_pages` may have been called by then.
bool find_private(Pages pages, const OnPages& on_pages);

/// Which pages find_written() looks at, and protects.
enum class Which : bool {
  all,           ///< 1 ns a page; those that are not there yet get an entry in the page table
  only_private,  ///< 40 ns a page that is there
};

/// Calls `on_pages` for the pages that were written to since they were protected, and protects them again.
/// The pages have to be registered with a userfaultfd for asynchronous write protection (io/page_watch.h).
/// False if they are not, or where the kernel has no PAGEMAP_SCAN (Linux 6.7).
bool find_written(Pages pages, Which which, const OnPages& on_pages);

}  // namespace dynswap
