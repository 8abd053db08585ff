#include "io/private_pages.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace dynswap {

namespace {

// Bits of a pagemap entry (Documentation/admin-guide/mm/pagemap.rst).
constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
constexpr std::uint64_t kSwapped = std::uint64_t{1} << 62;
constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61;  // or shared

bool is_private(std::uint64_t entry) noexcept {
  return (entry & (kPresent | kSwapped)) != 0 && (entry & kOfFile) == 0;
}

/// One descriptor a thread, for hundreds of looks a pass. In a forked child the parent's would still show the
/// parent's pages, so a child opens its own.
class Pagemap {
 public:
  static const Pagemap& of_this_thread() {
    thread_local Pagemap pagemap;
    if (pagemap.process_ != ::getpid()) pagemap.open();
    return pagemap;
  }
  ~Pagemap() { close(); }
  Pagemap(const Pagemap&) = delete;
  Pagemap& operator=(const Pagemap&) = delete;

  /// False if the kernel does not say.
  bool read(std::uintptr_t first_page, std::uint64_t* entries, std::size_t count) const noexcept {
    const auto bytes = static_cast<ssize_t>(count * sizeof(*entries));
    return fd_ >= 0 && ::pread(fd_, entries, static_cast<std::size_t>(bytes),
                               static_cast<off_t>(first_page * sizeof(*entries))) == bytes;
  }

 private:
  Pagemap() { open(); }
  void open() noexcept {
    close();
    process_ = ::getpid();
    fd_ = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  }
  void close() const noexcept {
    if (fd_ >= 0) ::close(fd_);
  }

  int fd_ = -1;
  pid_t process_ = 0;
};

}  // namespace

std::vector<ByteRange> private_ranges(const void* address, std::size_t bytes) {
  std::vector<ByteRange> ranges;
  if (bytes == 0) return ranges;
  static const auto kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const auto add = [&](std::uintptr_t from, std::uintptr_t to) {
    const ByteRange range{std::max(from, begin) - begin, std::min(to, begin + bytes) - begin};
    if (!ranges.empty() && ranges.back().end == range.begin) {
      ranges.back().end = range.end;
    } else {
      ranges.push_back(range);
    }
  };

  const Pagemap& pagemap = Pagemap::of_this_thread();
  std::array<std::uint64_t, 1024> entries;
  const std::uintptr_t end_page = (begin + bytes + kPage - 1) / kPage;
  for (std::uintptr_t page = begin / kPage; page < end_page;) {
    const std::size_t count = std::min<std::size_t>(end_page - page, entries.size());
    if (!pagemap.read(page, entries.data(), count)) return {{0, bytes}};
    for (std::size_t i = 0; i < count; ++i, ++page) {
      if (is_private(entries[i])) add(page * kPage, (page + 1) * kPage);
    }
  }
  return ranges;
}

std::size_t privately_modified(const void* address, std::size_t bytes) {
  std::size_t sum = 0;
  for (const ByteRange& range : private_ranges(address, bytes)) sum += range.end - range.begin;
  return sum;
}

}  // namespace dynswap
