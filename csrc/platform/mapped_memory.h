// Access to memory that is mapped from a file, which may have become shorter.
#pragma once

#include <cstddef>

namespace dynswap {

/// Note [A mapping outlives its file's end]: whoever truncates a file takes the pages behind its new end out
/// of all mappings of it, also those that a process has written to and has for itself. The next access to one
/// of them is answered with SIGBUS, which ends the process: no exception, and no check before the access is
/// early enough. So memory that is mapped from a file (Source::mapped) is never read or written by a plain
/// load or store of ours: the kernel copies it (process_vm_readv() on this process itself), and says EFAULT
/// where a page is gone. From 64 KiB on that is as quick as memcpy(); a small range costs 0.3 us more.
/// Whoever finds that memory is gone either reads the file, which gives a SourceError that names it, or
/// raises one. What the model's own code does with a master in place is not our access.
///
/// Copies the bytes; false, and any part of them is copied, if a page of `from` is gone. Where the system
/// forbids the call (a sandbox), they are copied by memcpy(), as on Windows, where no mapped file can be
/// truncated.
bool read_mapped(const void* from, void* to, std::size_t bytes) noexcept;
/// Copies the bytes as read_mapped() does, where pages of `to` may be gone; false after any part was written.
bool write_mapped(void* to, const void* from, std::size_t bytes) noexcept;

}  // namespace dynswap
