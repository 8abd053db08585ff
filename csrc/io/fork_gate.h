// Keeps fork() and transfers from the disk apart.
#pragma once

namespace dynswap {

/// Held while the disk writes to this process's memory by itself.
///
/// Note [fork and O_DIRECT]: fork() makes private memory copy-on-write. On kernels that do not pin such
/// pages for the child's sake (before about 6.3), a page that the disk is writing to stays with whoever
/// does not write to it next: when two weights meet in a page, the bytes on their way to one are lost for
/// this process as soon as the other is written (open(2), NOTES). So a fork waits for the transfers that
/// have begun, milliseconds at most, and none begins during it. vfork() and posix_spawn(), which subprocess
/// uses, copy no memory and wait for nothing.
class NoFork {
 public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
};

}  // namespace dynswap
