// Memory on Windows. Each question that Windows does not answer has an answer that is always safe: a range is
// not known to be private, watched, or mapped from a file.
#include "platform/memory.h"

#include <cerrno>
#include <cstring>

#include "platform/mapped_memory.h"
#include "platform/mappings.h"
#include "platform/own_pages.h"
#include "platform/page_watch.h"
#include "platform/pagemap.h"
#include "platform/windows_api.h"

namespace dynswap {

std::size_t page_size() noexcept {
  static const std::size_t size = [] {
    SYSTEM_INFO info;
    ::GetSystemInfo(&info);
    return static_cast<std::size_t>(info.dwPageSize);
  }();
  return size;
}

void* map_memory(std::size_t bytes) noexcept {
  return ::VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void* map_shared(int, std::uint64_t, std::size_t) noexcept {
  std::uint64_t inode_of(int) noexcept { return 0; }
  errno = ENOSYS;
  return nullptr;
}

void unmap_memory(void* address, std::size_t) noexcept { ::VirtualFree(address, 0, MEM_RELEASE); }

// The C library does not tell which blocks have their pages for themselves.
bool has_own_pages(const void*, std::size_t) noexcept { return false; }

// Windows lets nobody truncate a file while it is mapped.
bool read_mapped(const void* from, void* to, std::size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
  return true;
}

bool write_mapped(void* to, const void* from, std::size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
  return true;
}

bool find_private(Pages, const OnPages&) { return false; }
bool find_written(Pages, PageSelection, const OnPages&) { return false; }

struct PageWatch::Kernel {};

std::shared_ptr<PageWatch> PageWatch::over(Pages, PageSelection) { return nullptr; }
PageWatch::~PageWatch() = default;
std::optional<std::uint64_t> PageWatch::writes() { return std::nullopt; }
bool PageWatch::of_this_process() const noexcept { return true; }
void PageWatch::discard_writes() noexcept {}
void PageWatch::expect_writes() noexcept {}

// A view's file can be asked for, but not where in the file the view begins.
Mappings Mappings::of_this_process() { return {}; }

}  // namespace dynswap
