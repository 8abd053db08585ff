// Pages of memory, and memory that comes straight from the operating system.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynswap {

/// A range of whole pages: their addresses are [begin, end).
struct Pages {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

std::size_t page_size() noexcept;

/// The pages that lie wholly within the bytes; empty (begin == end) if there are none.
Pages pages_within(const void* address, std::size_t bytes) noexcept;
/// The pages on which the bytes lie.
Pages pages_around(const void* address, std::size_t bytes) noexcept;

/// New, zeroed pages outside the C library's heap, in huge pages where the system has them to spare. Null if
/// there is no memory.
void* map_memory(std::size_t bytes) noexcept;
/// `bytes` of an open file, from `offset` (a multiple of the page size) on: what one process writes there,
/// others read. Null if they cannot be mapped, with the reason in errno, and on Windows.
void* map_shared(int file, std::uint64_t offset, std::size_t bytes) noexcept;

/// The number by which the system knows an open file; 0 if it does not tell.
std::uint64_t inode_of(int file) noexcept;
/// Gives memory of either kind back. `bytes` is what they were mapped with.
void unmap_memory(void* address, std::size_t bytes) noexcept;

}  // namespace dynswap
