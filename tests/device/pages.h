// Whether memory is still what it was when it was registered.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pretend {

/// A driver takes the pages that it locks for writing (pin_user_pages, FOLL_WRITE): to the kernel's tracking
/// of writes, each of them has been written to.
void write_to_pages(void* address, std::size_t bytes);
/// Whether the system lets a device keep these pages: not those that may only be read, nor a file's that it
/// would have to write back (Linux 6.5 and later).
bool may_be_locked(const void* address);

/// Whether all of these addresses are mapped. A card reads pages that were unmapped since they were
/// registered; here nobody can.
bool mapped(const void* address, std::size_t bytes);

/// Whole pages.
void mark_pages(void* address, std::size_t bytes);
void unmark_pages(void* address, std::size_t bytes);
/// All of them are mapped, and have been since they were marked. Slow: reads what the system has of the
/// process.
bool pages_marked(const void* address, std::size_t bytes);

}  // namespace pretend
