#include "platform/fork_safe.h"
#include "platform/page_watch.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "platform/process.h"

namespace dynswap {

namespace {

// As in <linux/userfaultfd.h>; the headers here may be older than these values.
constexpr int kUserModeOnly = 1;                           // what a process may without privileges
constexpr std::uint64_t kWpUnpopulated = 1ull << 13;       // also anonymous pages that are not present yet
constexpr std::uint64_t kWpAsync = 1ull << 15;             // Linux 6.7
constexpr unsigned long kNewFromDevice = _IO(0xAA, 0x00);  // of /dev/userfaultfd, if the call is forbidden

int open_userfaultfd() noexcept {
  int fd = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly));
  if (fd < 0) {
    const int device = ::open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    if (device < 0) return -1;
    fd = ::ioctl(device, kNewFromDevice, O_CLOEXEC | O_NONBLOCK | kUserModeOnly);
    ::close(device);
    if (fd < 0) return -1;
  }
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = kWpAsync | kWpUnpopulated;
  if (::ioctl(fd, UFFDIO_API, &api) == 0) return fd;
  ::close(fd);
  return -1;
}

uffdio_range range_of(Pages pages) noexcept { return {pages.begin, pages.end - pages.begin}; }

bool overlap(Pages a, Pages b) noexcept { return a.begin < b.end && b.begin < a.end; }

}  // namespace

/// The userfaultfd of this process, and the pages that are watched through it.
struct PageWatch::Kernel {
  const int fd = open_userfaultfd();
  Mutex mutex;
  // LOCK: mutex guards all below.
  struct Watched {
    PageWatch* watch = nullptr;
    std::weak_ptr<PageWatch> shared;
  };
  std::multimap<std::uintptr_t, Watched> watched;  ///< by their first page
  std::size_t longest = 0;                         ///< bytes of the longest range that was ever watched

  /// Never freed: a watch may outlive static objects.
  static std::atomic<Kernel*>& current() {
    static std::atomic<Kernel*> kernel{nullptr};
    return kernel;
  }

  static Kernel* of_this_process() {
    if (Kernel* const known = current()) return known;
    static const bool follows_forks = at_fork(nullptr, nullptr, &PageWatch::forget_after_fork);
    if (!follows_forks) return nullptr;
    auto* const made = new Kernel;
    Kernel* other = nullptr;
    if (current().compare_exchange_strong(other, made)) return made;
    if (made->fd >= 0) ::close(made->fd);
    delete made;
    return other;
  }

  bool register_pages(Pages pages) const noexcept {
    uffdio_register arguments{};
    arguments.range = range_of(pages);
    arguments.mode = UFFDIO_REGISTER_MODE_WP;
    return ::ioctl(fd, UFFDIO_REGISTER, &arguments) == 0;
  }

  void unregister_pages(Pages pages) const noexcept {
    uffdio_range range = range_of(pages);
    ::ioctl(fd, UFFDIO_UNREGISTER, &range);
  }

  template <class Use>
  void for_overlapping(Pages pages, const Use& use) {
    auto entry = watched.lower_bound(pages.begin - std::min(longest, pages.begin));
    for (; entry != watched.end() && entry->first < pages.end; ++entry) {
      if (overlap(entry->second.watch->pages_, pages)) use(*entry->second.watch);
    }
  }
};

/// Finds the pages that were written, counts the write for every watch over them, and protects them again.
/// False if the kernel does not tell.
bool PageWatch::look() {
  bool found = false;
  const bool told = find_written(pages_, which_, [&](Pages written) {
    found = true;
    kernel_.for_overlapping(written, [](PageWatch& watch) { ++watch.writes_; });
  });
  if (found && which_ == PageSelection::private_only) {
    std::size_t bytes = 0;
    if (find_private(pages_, [&](Pages own) { bytes += own.end - own.begin; }) &&
        bytes == pages_.end - pages_.begin)
      which_ = PageSelection::all;
  }
  return told;
}

// The lock may be held by a thread that does not exist in the child. The descriptor is the parent's: through
// it the child would change the protection of the parent's pages.
void PageWatch::forget_after_fork() {
  const Kernel* const parents = Kernel::current().exchange(nullptr);
  if (parents != nullptr && parents->fd >= 0) ::close(parents->fd);
}

std::shared_ptr<PageWatch> PageWatch::over(Pages pages, PageSelection which) {
  Kernel* const kernel = Kernel::of_this_process();
  if (kernel == nullptr || kernel->fd < 0 || pages.begin == pages.end) return nullptr;
  std::vector<std::shared_ptr<PageWatch>> known;  // released after the lock, which their destructor takes
  std::shared_ptr<PageWatch> made;
  const std::lock_guard lock(kernel->mutex);
  const auto [first, last] = kernel->watched.equal_range(pages.begin);
  for (auto entry = first; entry != last; ++entry) {
    known.push_back(entry->second.shared.lock());
    PageWatch* const same = known.back().get();
    if (same == nullptr || same->pages_.end != pages.end || same->lost_) continue;
    same->lost_ = !same->look();  // other memory may have been mapped there since
    if (!same->lost_) return known.back();
  }
  if (!kernel->register_pages(pages)) return nullptr;
  made.reset(new PageWatch(*kernel, pages, which));
  kernel->watched.emplace(pages.begin, Kernel::Watched{made.get(), made});
  kernel->longest = std::max(kernel->longest, pages.end - pages.begin);
  made->lost_ = !made->look();
  if (made->lost_) return nullptr;
  return made;
}

PageWatch::~PageWatch() {
  if (&kernel_ != Kernel::current()) return;
  const std::lock_guard lock(kernel_.mutex);
  const auto [first, last] = kernel_.watched.equal_range(pages_.begin);
  kernel_.watched.erase(
      std::find_if(first, last, [&](const auto& entry) { return entry.second.watch == this; }));
  // Pages that others watch, too, stay as they are: to register them again would count as a write.
  Pages left = pages_;
  kernel_.for_overlapping(pages_, [&](const PageWatch& other) {  // in the order of their beginnings
    if (left.begin < other.pages_.begin) kernel_.unregister_pages({left.begin, other.pages_.begin});
    left.begin = std::max(left.begin, other.pages_.end);
  });
  if (left.begin < left.end) kernel_.unregister_pages(left);
}

bool PageWatch::of_this_process() const noexcept { return &kernel_ == Kernel::current(); }

std::optional<std::uint64_t> PageWatch::writes() {
  if (!of_this_process()) return std::nullopt;
  const std::lock_guard lock(kernel_.mutex);
  if (!lost_) lost_ = !look();
  if (lost_) return std::nullopt;
  return writes_;
}

void PageWatch::discard_writes() noexcept {
  if (!of_this_process()) return;
  const std::lock_guard lock(kernel_.mutex);
  if (!lost_) lost_ = !find_written(pages_, which_, [](Pages) {});
}

void PageWatch::expect_writes() noexcept {
  if (&kernel_ != Kernel::current()) return;
  uffdio_writeprotect arguments{};
  arguments.range = range_of(pages_);
  ::ioctl(kernel_.fd, UFFDIO_WRITEPROTECT, &arguments);
}

}  // namespace dynswap
