#include "platform/pagemap.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "platform/fork_safe.h"

namespace dynswap {

namespace {

/// The open /proc/self/pagemap of a thread, which looks hundreds of times in a pass. In a forked child the
/// parent's descriptor would still show the parent's pages, so a child opens its own.
class Pagemap {
 public:
  static int of_this_thread() {
    thread_local Pagemap pagemap;
    if (pagemap.forks_ != forks()) pagemap.open();
    return pagemap.fd_;
  }
  ~Pagemap() { close(); }
  Pagemap(const Pagemap&) = delete;
  Pagemap& operator=(const Pagemap&) = delete;

 private:
  Pagemap() { open(); }

  void open() noexcept {
    close();
    forks_ = forks();
    fd_ = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  }
  void close() const noexcept {
    if (fd_ >= 0) ::close(fd_);
  }

  int fd_ = -1;
  unsigned forks_ = 0;
};

// As in <linux/fs.h> since Linux 6.7 (page_region, pm_scan_arg); the headers here may be older.
struct Region {
  std::uint64_t begin, end, categories;
};

struct Scan {
  std::uint64_t size = sizeof(Scan);
  std::uint64_t flags = 0;
  std::uint64_t begin = 0, end = 0;
  std::uint64_t walk_end = 0;  ///< set by the kernel: the address at which it stopped
  std::uint64_t regions = 0, region_count = 0;
  std::uint64_t most_pages = 0;
  std::uint64_t inverted = 0;  ///< categories that count where they are absent
  std::uint64_t all_of = 0, any_of = 0;
  std::uint64_t returned = 0;
};

constexpr std::uint64_t kProtect = 1u << 0;
constexpr std::uint64_t kFailIfUnregistered = 1u << 1;
constexpr std::uint64_t kWritten = 1u << 1;
constexpr std::uint64_t kOfFile = 1u << 2;
constexpr std::uint64_t kPresent = 1u << 3;
constexpr std::uint64_t kSwapped = 1u << 4;
constexpr unsigned long kPagemapScan = _IOWR('f', 16, Scan);

bool run(Scan scan, const OnPages& on_pages) {
  const int pagemap = Pagemap::of_this_thread();
  if (pagemap < 0) return false;
  std::array<Region, 64> regions;
  scan.regions = reinterpret_cast<std::uintptr_t>(regions.data());
  scan.region_count = regions.size();
  while (scan.begin < scan.end) {
    const int found = ::ioctl(pagemap, kPagemapScan, &scan);
    if (found < 0) return false;
    for (int i = 0; i < found; ++i)
      on_pages({static_cast<std::uintptr_t>(regions[i].begin), static_cast<std::uintptr_t>(regions[i].end)});
    scan.begin = scan.walk_end;
  }
  return true;
}

bool scan_private(Pages pages, const OnPages& on_pages) {
  return run({.begin = pages.begin,
              .end = pages.end,
              .inverted = kOfFile,
              .all_of = kOfFile,
              .any_of = kPresent | kSwapped},
             on_pages);
}

bool scan_written(Pages pages, PageSelection which, const OnPages& on_pages) {
  Scan scan{.flags = kProtect | kFailIfUnregistered,
            .begin = pages.begin,
            .end = pages.end,
            .all_of = kWritten,
            .returned = kWritten};  // the kernel has a fast path for this category alone
  if (which == PageSelection::private_only) {
    scan.inverted = kOfFile;
    scan.all_of |= kOfFile;
    scan.any_of = kPresent | kSwapped;
  }
  return run(scan, on_pages);
}

bool has_scan() {
  static const bool known = [] {
    const int local = 0;
    return scan_private(pages_around(&local, sizeof(local)), [](Pages) {});
  }();
  return known;
}

/// Finds private pages as scan_private() does, on a kernel before 6.7: reads eight bytes for each page
/// (Documentation/admin-guide/mm/pagemap.rst).
bool read_private(Pages pages, const OnPages& on_pages) {
  const auto is_private = [](std::uint64_t entry) {
    constexpr std::uint64_t present = std::uint64_t{1} << 63;
    constexpr std::uint64_t swapped = std::uint64_t{1} << 62;
    constexpr std::uint64_t of_file = std::uint64_t{1} << 61;  // or shared
    return (entry & (present | swapped)) != 0 && (entry & of_file) == 0;
  };
  const int pagemap = Pagemap::of_this_thread();
  if (pagemap < 0) return false;
  std::array<std::uint64_t, 1024> entries;
  const std::uintptr_t end = pages.end / page_size();
  for (std::uintptr_t page = pages.begin / page_size(); page < end;) {
    const std::size_t count = std::min<std::size_t>(end - page, entries.size());
    const auto bytes = static_cast<ssize_t>(count * sizeof(std::uint64_t));
    if (::pread(pagemap, entries.data(), static_cast<std::size_t>(bytes),
                static_cast<off_t>(page * sizeof(std::uint64_t))) != bytes)
      return false;
    for (std::size_t i = 0; i < count; ++i, ++page) {
      if (is_private(entries[i])) on_pages({page * page_size(), (page + 1) * page_size()});
    }
  }
  return true;
}

}  // namespace

bool find_private(Pages pages, const OnPages& on_pages) {
  return has_scan() ? scan_private(pages, on_pages) : read_private(pages, on_pages);
}

bool find_written(Pages pages, PageSelection which, const OnPages& on_pages) {
  return scan_written(pages, which, on_pages);
}

}  // namespace dynswap
