// Memory for small objects that live long, outside the C library's heap.
#pragma once

#include <cstddef>

namespace dynswap {

/// Note [Small blocks pin large holes]: the objects that are made for a weight at its first access (a
/// resident's tensor, its storage, its record) live as long as the install. The C library carves them out of
/// the activation that was freed last, and what is left of that is too small for the next activation of the
/// same size. With some 80 residents and activations of 100 MiB, the process used 812 MiB where 486 MiB were
/// needed. So these objects have blocks of their own, with which it uses 530 MiB. Freed blocks are used
/// again, and never returned to the system.
///
/// A base for the classes of such objects: gives them memory in such blocks. Thread-safe.
struct OutsideTheHeap {
  static void* operator new(std::size_t bytes);
  static void operator delete(void* block, std::size_t bytes) noexcept;
};

}  // namespace dynswap
