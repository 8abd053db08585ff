// Which pages of memory have been written to: exactly, as the kernel tracks them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "platform/pagemap.h"

namespace dynswap {

/// Note [Writes that bump no version]: `p.data[i] = x`, NumPy, DLPack and fused optimizers write to a master
/// without bumping its version counter. Hashing the whole master at each access would take as long as copying
/// it. But the kernel can track the pages that are written: they are registered with a userfaultfd and
/// write-protected. The first write to a page lifts its protection; the kernel does so by itself, without a
/// handler for the fault (asynchronous mode). PAGEMAP_SCAN then finds the unprotected pages and protects them
/// again (Linux 6.7, Documentation/admin-guide/mm/userfaultfd.rst, .../pagemap.rst).
///
/// Measured for 1 GiB of 4 KiB pages (benchmarks/results/silent_writes.json): a look that finds nothing takes
/// 0.43 ms, where reading all bytes takes 38 ms. A look that finds all pages written and protects them again
/// takes 11 ms. Writing takes 47 ms to unprotected pages and 327 ms to protected ones: 1.1 us more for the
/// first write to each page. So code that is about to write much, as an optimizer is, announces it with
/// expect_writes(); the write then takes 72 ms.
///
/// The kernel does not see what a device writes to page-locked memory (DMA), nor what other processes write
/// to shared memory.
class PageWatch {
 public:
  /// Watches these pages from now on. All callers for the same pages share one watch.
  /// PageSelection::private_only is for a private file mapping: it watches only the pages that this process
  /// has for itself, and leaves the others untouched, until all are its own. Returns null where the kernel
  /// does not track pages (it is not Linux 6.7 or later, or a container forbids userfaultfd), and where these
  /// pages cannot be registered.
  static std::shared_ptr<PageWatch> over(Pages pages, PageSelection which);
  ~PageWatch();
  PageWatch(const PageWatch&) = delete;
  PageWatch& operator=(const PageWatch&) = delete;

  /// Looks for writes, and returns a count that differs from the last one if the pages have been written to
  /// since. Returns nothing if they are not watched any more: other memory has been mapped there, or this
  /// process is a forked child.
  std::optional<std::uint64_t> writes();
  /// False in a child that was forked since: nothing is told there.
  bool of_this_process() const noexcept;

  /// Counts no write that was made since the last look: it was the caller's, and changed nothing.
  void discard_writes() noexcept;

  /// Announces that much is about to be written: lifts the protection of all pages at once, so that writes
  /// cost no page faults until the next writes(), which counts the announcement as a write.
  void expect_writes() noexcept;

 private:
  struct Kernel;

  PageWatch(Kernel& kernel, Pages pages, PageSelection which) noexcept
      : kernel_(kernel), pages_(pages), which_(which) {}
  bool look();
  static void forget_after_fork();

  Kernel& kernel_;  ///< never freed
  const Pages pages_;
  // LOCK: Kernel::mutex guards all below.
  PageSelection which_;
  std::uint64_t writes_ = 0;
  bool lost_ = false;
};

}  // namespace dynswap
