// What the kernel tells of the pages of this process (/proc/self/pagemap).
#pragma once

#include <functional>

#include "platform/memory.h"

namespace dynswap {

using OnPages = std::function<void(Pages)>;

/// Calls `on_pages` for the pages that this process has for itself: present or swapped out, and not of a
/// file. Returns false if the kernel does not tell (no /proc, Windows); `on_pages` may have been called
/// before that.
bool find_private(Pages pages, const OnPages& on_pages);

/// The pages that find_written() looks at and protects.
enum class PageSelection : bool {
  all,           ///< takes 1 ns a page, and gives pages that are not present yet a page table entry
  private_only,  ///< those that the process has for itself; takes 40 ns for each page that is present
};

/// Calls `on_pages` for the pages that were written to since they were last protected, and protects them
/// again. The pages must be registered with a userfaultfd for asynchronous write protection
/// (platform/page_watch.h). Returns false if they are not, or if the kernel has no PAGEMAP_SCAN (it is older
/// than Linux 6.7, or Windows).
bool find_written(Pages pages, PageSelection which, const OnPages& on_pages);

}  // namespace dynswap
