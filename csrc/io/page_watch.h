// Whether memory has been written to, exactly, as the kernel tells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "io/pagemap.h"

namespace dynswap {

/// Note [Writes that nobody tells of]: `p.data[i] = x`, NumPy, DLPack and fused optimizers write to a master
/// and bump no version counter. To hash it whole at each access takes as long as to copy it. The kernel knows
/// the pages that were written: they are registered with a userfaultfd and write-protected; the first write
/// to one lifts its protection (asynchronously: nobody has to serve the fault), and PAGEMAP_SCAN finds the
/// pages that are unprotected, and protects them again (Linux 6.7,
/// Documentation/admin-guide/mm/userfaultfd.rst, .../pagemap.rst).
///
/// Measured on a GiB in 4 KiB pages (benchmarks/silent_writes.py): a look that finds nothing 0.26 ms (a hash
/// takes 41 ms, a copy at 25 GB/s 43 ms), protecting 9 ms, lifting the protection 21 ms; a write to a
/// protected page costs 1.4 us (0.4 s a GiB) once. So whoever is about to write much, as an optimizer is,
/// says so before: expect_writes().
///
/// What the kernel does not see is a write by a device (DMA) to page-locked memory, and of shared memory what
/// other processes write.
class PageWatch {
 public:
  /// Watches these pages from now on. One for all that watch the same ones. `which`: of a private file
  /// mapping, only what this process has for itself, until that is all of it; the rest stays untouched. Null
  /// where the kernel cannot (another one than Linux from 6.7 on; a container that forbids userfaultfd), or
  /// no more.
  static std::shared_ptr<PageWatch> over(Pages pages, Which which);
  ~PageWatch();
  PageWatch(const PageWatch&) = delete;
  PageWatch& operator=(const PageWatch&) = delete;

  /// A number that is another one than before if the pages have been written to since. Nothing if they are
  /// watched no more: other memory has been mapped there, or this process is a forked child.
  std::optional<std::uint64_t> writes();

  /// Much is about to be written: until the next writes(), which counts it as a write, it costs nothing.
  void expect_writes() noexcept;

 private:
  struct Kernel;

  PageWatch(Kernel& kernel, Pages pages, Which which) noexcept
      : kernel_(kernel), pages_(pages), which_(which) {}
  bool look();
  static void forget_after_fork();

  Kernel& kernel_;  ///< never freed
  const Pages pages_;
  // LOCK: Kernel::mutex guards all below.
  Which which_;
  std::uint64_t writes_ = 0;
  bool lost_ = false;
};

}  // namespace dynswap
