#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <sstream>

#include "core/check.h"
#include "io/aligned_buffer.h"
#include "io/fork_gate.h"

namespace dynswap {

namespace {

constexpr std::size_t kWindowBytes = 4u << 20;  ///< the page cache is asked about so much at a time
constexpr std::size_t kBounceBytes = 1u << 20;  ///< one transfer through the bounce buffer
constexpr std::size_t kMeasured = 1u << 20;     ///< shorter reads say little of a disk's speed

/// As errno names it. (std::strerror need not be thread-safe.)
std::string describe(int error) { return std::generic_category().message(error); }

std::int64_t modified_ns(const struct stat& status) noexcept {
  return static_cast<std::int64_t>(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec;
}

bool congruent(std::uint64_t offset, const std::byte* address, std::size_t alignment) noexcept {
  return (reinterpret_cast<std::uintptr_t>(address) - offset) % alignment == 0;
}

std::int64_t transfer(int direct_fd, const iovec* parts, int count, std::uint64_t offset) {
  const NoFork no_fork;
  return ::preadv(direct_fd, parts, count, static_cast<off_t>(offset));
}

}  // namespace

std::shared_ptr<const File> File::open(const std::string& path) {
  return std::shared_ptr<const File>(new File(path));
}

File::File(const std::string& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) throw SourceError("cannot open the checkpoint file '" + path + "': " + describe(errno));
  struct stat status{};
  const bool known = ::fstat(fd_, &status) == 0;
  if (!known || !S_ISREG(status.st_mode)) {
    const std::string reason = known ? "it is not an ordinary file" : describe(errno);
    ::close(fd_);
    throw SourceError("cannot read weights from '" + path + "': " + reason);
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
  inode_ = status.st_ino;
  device_ = status.st_dev;
  modified_ns_ = modified_ns(status);
  admission_ = std::make_unique<Admission>(size_);
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_SEQUENTIAL);  // longer read-ahead for what enters the page cache
  open_direct();
}

File::~File() {
  if (direct_fd_ >= 0) ::close(direct_fd_);
  ::close(fd_);
}

void File::open_direct() noexcept {
  memory_align_ = offset_align_ = kDirectAlign;
#ifdef STATX_DIOALIGN
  struct statx status{};
  if (::statx(fd_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN)) {
    memory_align_ = status.stx_dio_mem_align;
    offset_align_ = status.stx_dio_offset_align;
  }
#endif
  // Zero: no direct reads on this file system. More than a page: a disk that we have no buffers for.
  if (memory_align_ == 0 || offset_align_ == 0) return;
  if (memory_align_ > kDirectAlign || offset_align_ > kDirectAlign) return;
  // Through the descriptor, so that it is the same file even if the name has been given to another.
  const std::string self = "/proc/self/fd/" + std::to_string(fd_);
  direct_fd_ = ::open(self.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  direct_ = direct_fd_ >= 0;
}

void File::read(std::uint64_t offset, std::byte* dst, std::size_t bytes, const std::string& who, Keep keep,
                ReadMode mode) const {
  const auto where = [&] {
    std::ostringstream text;
    text << "weight '" << who << "' (bytes " << offset << " to " << offset + bytes << " of '" << path_
         << "')";
    return text.str();
  };
  if (offset > size_ || bytes > size_ - offset) {
    throw SourceError(where() + " lies beyond the end of the file, which has " + std::to_string(size_) +
                      " bytes: the file is truncated; get a complete copy and load it again");
  }
  std::size_t done = 0;
  while (done < bytes) {
    const std::uint64_t at = offset + done;
    // Windows end where blocks end, so that no block is read twice.
    const std::size_t window =
        std::min<std::uint64_t>(bytes - done, align_down(at + kWindowBytes, kDirectAlign) - at);
    const std::int64_t got = read_some(at, dst + done, window, read_path(at, window, keep, mode));
    if (got > 0) {
      done += static_cast<std::size_t>(got);
      continue;
    }
    const int error = errno;
    check_unchanged(who);
    throw SourceError(where() + " could not be read: " +
                      (got == 0 ? std::string("the file ended early") : describe(error)) +
                      "; check the disk, and load the file again");
  }
  // After the bytes were read, so that no change before or during the read goes unseen.
  check_unchanged(who);
}

void File::check_unchanged(const std::string& who) const {
  struct stat status{};
  if (::fstat(fd_, &status) != 0) {
    throw SourceError("weight '" + who + "': '" + path_ + "' cannot be checked: " + describe(errno));
  }
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size == size_ && modified_ns(status) == modified_ns_) return;
  std::ostringstream text;
  text << "weight '" << who << "' cannot be read: its file '" << path_ << "' has been ";
  if (size < size_) {
    text << "truncated since it was loaded (" << size_ << " bytes then, " << size << " now)";
  } else {
    text << "changed since it was loaded";
    if (size != size_) text << " (" << size_ << " bytes then, " << size << " now)";
  }
  text << "; load it again";
  throw SourceError(text.str());
}

File::ReadPath File::read_path(std::uint64_t offset, std::size_t bytes, Keep keep,
                               ReadMode mode) const noexcept {
  const bool may_stay = keep != Keep::no;
  if (may_stay && bytes < kSmallRead) return ReadPath::enter;
  const bool quick = mode == ReadMode::quick || keep == Keep::always;
  const bool cached = in_page_cache(fd_, offset, bytes);
  if (cached && quick) return ReadPath::copy;
  if (!cached && quick && may_stay && admission_->admit(offset)) return ReadPath::enter;
  if (direct_.load(std::memory_order_relaxed)) return ReadPath::direct;
  if (cached) return ReadPath::copy;
  return may_stay ? ReadPath::enter : ReadPath::through;
}

std::int64_t File::read_some(std::uint64_t offset, std::byte* dst, std::size_t bytes, ReadPath path) const {
  for (;;) {
    const auto begin = std::chrono::steady_clock::now();
    const std::int64_t got = path == ReadPath::direct ? read_direct(offset, dst, bytes)
                                                      : ::pread(fd_, dst, bytes, static_cast<off_t>(offset));
    if (got >= 0) {
      const auto length = static_cast<std::size_t>(got);
      if (length >= kMeasured && path != ReadPath::copy) {
        admission_->took(path != ReadPath::direct, length, std::chrono::steady_clock::now() - begin);
      }
      if (path == ReadPath::through) drop_from_page_cache(fd_, offset, length);
      return got;
    }
    if (errno == EINTR) continue;
    if (path != ReadPath::direct || (errno != EINVAL && errno != EOPNOTSUPP)) return got;
    direct_.store(false, std::memory_order_relaxed);  // the file system took the flag, but does not mean it
    path = ReadPath::through;
  }
}

std::int64_t File::read_direct(std::uint64_t offset, std::byte* dst, std::size_t bytes) const {
  const bool spans_a_boundary = align_up(offset, offset_align_) <= align_down(offset + bytes, offset_align_);
  if (spans_a_boundary && congruent(offset, dst, memory_align_)) return read_in_place(offset, dst, bytes);
  thread_local const AlignedBuffer bounce(kBounceBytes + 2 * kDirectAlign);
  const std::uint64_t begin = align_down(offset, offset_align_);
  const std::size_t skip = offset - begin;
  // A scrap past the last transfer's end goes with it.
  const std::size_t wanted = bytes <= kBounceBytes + kDirectAlign - skip ? bytes : kBounceBytes - skip;
  const iovec blocks{bounce.data(), align_up(skip + wanted, offset_align_)};
  const std::int64_t got = transfer(direct_fd_, &blocks, 1, begin);
  if (got < 0) return got;
  if (static_cast<std::size_t>(got) <= skip) return 0;
  const std::size_t usable = std::min(static_cast<std::size_t>(got) - skip, wanted);
  std::memcpy(dst, bounce.data() + skip, usable);
  return static_cast<std::int64_t>(usable);
}

std::int64_t File::read_in_place(std::uint64_t offset, std::byte* dst, std::size_t bytes) const {
  // Invariant: the range touches the end of a block, so that its first and last block are two.
  // One transfer: the block that holds the beginning, whole blocks in place, the block that holds the end.
  alignas(kDirectAlign) std::byte first[kDirectAlign];
  alignas(kDirectAlign) std::byte last[kDirectAlign];
  const std::uint64_t begin = align_down(offset, offset_align_);
  const std::size_t skip = offset - begin;
  const std::size_t head = skip == 0 ? 0 : offset_align_ - skip;  // bytes of dst that come from `first`
  const std::size_t tail = (offset + bytes) % offset_align_;      // ... and from `last`
  const std::size_t whole = bytes - head - tail;
  iovec parts[3];
  int count = 0;
  if (head > 0) parts[count++] = {first, offset_align_};
  if (whole > 0) parts[count++] = {dst + head, whole};
  if (tail > 0) parts[count++] = {last, offset_align_};
  const std::int64_t got = transfer(direct_fd_, parts, count, begin);
  if (got < 0) return got;
  if (static_cast<std::size_t>(got) <= skip) return 0;
  const std::size_t usable = std::min(static_cast<std::size_t>(got) - skip, bytes);
  std::memcpy(dst, first + skip, std::min(head, usable));
  if (usable > head + whole) std::memcpy(dst + head + whole, last, usable - head - whole);
  return static_cast<std::int64_t>(usable);
}

}  // namespace dynswap
