// Memory for small objects that live long, away from the C library's heap.
#pragma once

#include <cstddef>

namespace dynswap {

/// Note [Small blocks pin large holes]: what is made for a weight at its first access (a resident's tensor,
/// its storage, its record) stays for good, and the C library carves it out of the activation that was freed
/// last: what is left of that is too small for the next activation of its size, and nothing else fits. With
/// some 80 residents and activations of 100 MiB there were 350 MiB of holes: 812 MiB where 486 were owed. So
/// these objects have blocks of their own (530 MiB). The blocks are used again, and not given back.
///
/// A base for the classes of such objects.
struct OutsideTheHeap {
  static void* operator new(std::size_t bytes);
  static void operator delete(void* block, std::size_t bytes) noexcept;
};

}  // namespace dynswap
