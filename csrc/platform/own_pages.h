// Whether a block of memory has its pages for itself.
#pragma once

#include <cstddef>

namespace dynswap {

/// Note [Pages of one's own]: memory is locked by the page, and a copy from memory that is locked in one part
/// and not, or otherwise, in another is refused by the driver. Where the driver takes all of a page for
/// locked, a page that two tensors share can be locked for neither: whichever reaches beyond it could not be
/// copied by anybody, be it `x.to("cuda")` of an input that happens to be the neighbour. To lock only the
/// pages that lie wholly inside a tensor is no way out: then it is the tensor itself that torch cannot copy.
/// So a block is locked as a whole, and there only if nothing else lies on its pages.
///
/// The C library is asked. What malloc_usable_size() counts belongs to the block, and glibc counts up to the
/// end of a page for those blocks only that are mapped for themselves (the others end 8 bytes into the next
/// one's header). What lies before such a block in its first page is its own header. glibc maps blocks from
/// M_MMAP_THRESHOLD on, which begins at 128 KiB, and grows to the size of what is freed, up to 32 MiB, unless
/// MALLOC_MMAP_THRESHOLD_ is set in the environment.
///
/// True if nothing else lies on the pages of the `bytes` at `block`, which malloc gave. False also where the
/// C library does not tell.
bool has_own_pages(const void* block, std::size_t bytes) noexcept;

}  // namespace dynswap
