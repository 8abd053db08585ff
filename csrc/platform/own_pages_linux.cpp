#include "platform/own_pages.h"

#include <cstdint>

#include "platform/memory.h"

#if defined(__GLIBC__)
#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <malloc.h>

#include <cstdlib>
#endif

namespace dynswap {

#if defined(__GLIBC__)

namespace {

/// False where another allocator has been preloaded in place of the C library's.
bool malloc_is_of_glibc() noexcept {
  const auto library_of = [](void* function) -> void* {
    Dl_info info{};
    return dladdr(function, &info) != 0 ? info.dli_fbase : nullptr;
  };
  void* const allocator = dlsym(RTLD_DEFAULT, "posix_memalign");
  void* const glibc = library_of(dlsym(RTLD_DEFAULT, "gnu_get_libc_version"));
  return allocator != nullptr && glibc != nullptr && library_of(allocator) == glibc;
}

}  // namespace

bool has_own_pages(const void* block, std::size_t bytes) noexcept {
  static const bool known = malloc_is_of_glibc();
  if (!known || block == nullptr || bytes == 0) return false;
  constexpr std::size_t kLongestHeader = 128;  // with what aligning to 64 bytes leaves before the block
  const auto begin = reinterpret_cast<std::uintptr_t>(block);
  const std::uintptr_t end = begin + malloc_usable_size(const_cast<void*>(block));
  return end % page_size() == 0 && begin % page_size() <= kLongestHeader && begin + bytes <= end;
}

#else

bool has_own_pages(const void*, std::size_t) noexcept { return false; }

#endif

}  // namespace dynswap
