// Which pages of a private file mapping this process has written to.
#pragma once

#include <cstddef>
#include <vector>

namespace dynswap {

/// [begin, end) in bytes from the address that was asked for.
struct ByteRange {
  std::size_t begin = 0;
  std::size_t end = 0;
  bool operator==(const ByteRange&) const = default;
};

/// Note [Private pages]: a checkpoint is mapped copy-on-write (MAP_PRIVATE), so a master can be written to
/// without the file knowing: what was written is in anonymous pages of this process, and only there. The
/// kernel says which pages those are (/proc/self/pagemap: present or swapped out, and not of a file), so no
/// write goes unseen, whoever made it.
///
/// Returns the parts of [address, address + bytes) that lie in such pages, in order, neighbours merged.
/// Where the kernel does not say (no /proc), everything: the mapping is always right, only slower.
std::vector<ByteRange> private_ranges(const void* address, std::size_t bytes);

}  // namespace dynswap
