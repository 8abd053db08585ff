#include "platform/open_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>

#include "platform/memory.h"

namespace dynswap {

namespace {

constexpr int kMostParts = 3;
constexpr std::size_t kUsualAlignment = 4096;  ///< satisfies nearly every disk

int descriptor(std::intptr_t handle) noexcept { return static_cast<int>(handle); }

[[noreturn]] void fail() { throw std::system_error(errno, std::generic_category()); }

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

OpenFile::OpenFile(const std::string& path) : handle_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (handle_ < 0) fail();
  ::posix_fadvise(descriptor(handle_), 0, 0, POSIX_FADV_SEQUENTIAL);  // longer read-ahead into the page cache
  open_for_direct_transfers(O_RDONLY);
}

OpenFile::OpenFile(Scratch, const std::string& folder)
    : handle_(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR)) {
  if (handle_ < 0) fail();
  open_for_direct_transfers(O_RDWR);
}

void OpenFile::open_for_direct_transfers(int access) {
  const int fd = descriptor(handle_);
  std::size_t memory_alignment = kUsualAlignment, offset_alignment = kUsualAlignment;
#ifdef STATX_DIOALIGN
  struct statx status{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN)) {
    memory_alignment = status.stx_dio_mem_align;
    offset_alignment = status.stx_dio_offset_align;
  }
#endif
  // Zero: no direct transfers on this file system.
  if (memory_alignment == 0 || offset_alignment == 0) return;
  // Through the descriptor, so that it is the same file even if the name has been given to another.
  std::array<char, 40> self{};
  std::snprintf(self.data(), self.size(), "/proc/self/fd/%d", fd);
  direct_ = ::open(self.data(), access | O_CLOEXEC | O_DIRECT);
  if (direct_ < 0) return;
  memory_alignment_ = memory_alignment;
  offset_alignment_ = offset_alignment;
}

OpenFile::~OpenFile() {
  if (direct_ >= 0) ::close(descriptor(direct_));
  ::close(descriptor(handle_));
}

OpenFile::Status OpenFile::status() const {
  struct stat status{};
  if (::fstat(descriptor(handle_), &status) != 0) fail();
  return {S_ISREG(status.st_mode), static_cast<std::uint64_t>(status.st_size), status.st_ino, status.st_dev,
          static_cast<std::int64_t>(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec};
}

void OpenFile::reserve(std::uint64_t offset, std::uint64_t bytes) const {
  while (::fallocate(descriptor(handle_), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno == EOPNOTSUPP || errno == ENOSYS) return;
    if (errno != EINTR) fail();
  }
}

void OpenFile::write(std::uint64_t offset, const std::byte* src, std::size_t bytes) const {
  while (bytes > 0) {
    const ssize_t put = ::pwrite(descriptor(handle_), src, bytes, static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail();
    offset += static_cast<std::uint64_t>(put);
    src += put;
    bytes -= static_cast<std::size_t>(put);
  }
}

std::optional<std::size_t> OpenFile::write_direct(std::uint64_t offset, const std::byte* src,
                                                  std::size_t bytes) const {
  for (;;) {
    const ssize_t put = ::pwrite(descriptor(direct_), src, bytes, static_cast<off_t>(offset));
    if (put > 0) return static_cast<std::size_t>(put);
    if (put == 0) errno = EIO;
    if (errno == EINVAL || errno == EOPNOTSUPP) return std::nullopt;
    if (errno != EINTR) fail();
  }
}

std::size_t OpenFile::read(std::uint64_t offset, std::byte* dst, std::size_t bytes) const {
  for (;;) {
    const ssize_t got = ::pread(descriptor(handle_), dst, bytes, static_cast<off_t>(offset));
    if (got >= 0) return static_cast<std::size_t>(got);
    if (errno != EINTR) fail();
  }
}

std::optional<std::size_t> OpenFile::read_direct(std::uint64_t offset, std::span<const Part> parts) const {
  std::array<iovec, kMostParts> targets{};
  const std::size_t count = std::min(parts.size(), targets.size());
  for (std::size_t i = 0; i < count; ++i) targets[i] = {parts[i].address, parts[i].bytes};
  for (;;) {
    const ssize_t got =
        ::preadv(descriptor(direct_), targets.data(), static_cast<int>(count), static_cast<off_t>(offset));
    if (got >= 0) return static_cast<std::size_t>(got);
    if (errno == EINVAL || errno == EOPNOTSUPP)
      return std::nullopt;  // it took the flag, but does not mean it
    if (errno != EINTR) fail();
  }
}

bool OpenFile::is_cached(std::uint64_t offset, std::size_t bytes) const noexcept {
  const int fd = descriptor(handle_);
  const auto pages = static_cast<std::int64_t>((offset + bytes - 1) / page_size() - offset / page_size() + 1);
  const std::int64_t cached = cached_pages(fd, offset, bytes);
  if (cached >= 0) return 2 * cached > pages;
  return readable_now(fd, offset) && readable_now(fd, offset + bytes / 2) &&
         readable_now(fd, offset + bytes - 1);
}

void OpenFile::drop_cached(std::uint64_t offset, std::size_t bytes) const noexcept {
  // The kernel leaves pages that are not wholly in the range.
  const std::uint64_t begin = offset / page_size() * page_size();
  const std::uint64_t end = (offset + bytes + page_size() - 1) / page_size() * page_size();
  ::posix_fadvise(descriptor(handle_), static_cast<off_t>(begin), static_cast<off_t>(end - begin),
                  POSIX_FADV_DONTNEED);
}

void OpenFile::end_read_ahead() const noexcept {
  ::posix_fadvise(descriptor(handle_), 0, 0, POSIX_FADV_RANDOM);
}

}  // namespace dynswap
