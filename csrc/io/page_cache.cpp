#include "io/page_cache.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "io/pagemap.h"

namespace dynswap {

namespace {

/// How many pages of a range the page cache holds; -1 if the kernel (before 6.5) or a sandbox does not say.
std::int64_t cached_pages(int fd, std::uint64_t offset, std::size_t bytes) noexcept {
#ifdef SYS_cachestat
  constexpr long kCachestat = SYS_cachestat;
#else
  constexpr long kCachestat = 451;  // newer than the C library's headers
#endif
  struct Range {
    std::uint64_t offset;
    std::uint64_t bytes;
  } range{offset, bytes};
  struct Counts {
    std::uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } counts{};
  return ::syscall(kCachestat, fd, &range, &counts, 0u) == 0 ? static_cast<std::int64_t>(counts.cached) : -1;
}

/// Whether the byte at `offset` can be read without waiting for the disk.
bool readable_now(int fd, std::uint64_t offset) noexcept {
  std::byte byte;
  const iovec target{&byte, 1};
  return ::preadv2(fd, &target, 1, static_cast<off_t>(offset), RWF_NOWAIT) == 1;
}

}  // namespace

bool in_page_cache(int fd, std::uint64_t offset, std::size_t bytes) noexcept {
  const auto pages = static_cast<std::int64_t>((offset + bytes - 1) / page_size() - offset / page_size() + 1);
  const std::int64_t cached = cached_pages(fd, offset, bytes);
  if (cached >= 0) return 2 * cached > pages;
  return readable_now(fd, offset) && readable_now(fd, offset + bytes / 2) &&
         readable_now(fd, offset + bytes - 1);
}

void drop_from_page_cache(int fd, std::uint64_t offset, std::size_t bytes) noexcept {
  // The kernel leaves pages that are not wholly in the range.
  const std::uint64_t begin = offset / page_size() * page_size();
  const std::uint64_t end = (offset + bytes + page_size() - 1) / page_size() * page_size();
  ::posix_fadvise(fd, static_cast<off_t>(begin), static_cast<off_t>(end - begin), POSIX_FADV_DONTNEED);
}

Admission::Admission(std::uint64_t file_bytes) : read_before_(file_bytes / kBlockBytes / 64 + 1) {}

bool Admission::admit(std::uint64_t offset) noexcept {
  const std::uint64_t block = offset / kBlockBytes;
  const std::uint64_t bit = std::uint64_t{1} << block % 64;
  if ((read_before_[block / 64].fetch_or(bit, std::memory_order_relaxed) & bit) == 0) return false;
  if (!direct_.known() || !through_cache_.known()) return true;
  return through_cache_.ns_per_byte() <= (1 + kPayback) * direct_.ns_per_byte();
}

void Admission::took(bool through_cache, std::size_t bytes, std::chrono::nanoseconds time) noexcept {
  Speed& speed = through_cache ? through_cache_ : direct_;
  speed.nanoseconds += static_cast<std::uint64_t>(time.count());
  speed.bytes += bytes;
}

}  // namespace dynswap
