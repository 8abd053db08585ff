#include "io/file.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <span>
#include <sstream>
#include <system_error>

#include "core/align.h"
#include "core/amount.h"
#include "core/check.h"
#include "core/host_memory.h"
#include "io/aligned_buffer.h"
#include "io/fork_gate.h"

namespace dynswap {

namespace {

constexpr std::size_t kWindowBytes = 4u << 20;  ///< the page cache is asked about so much at a time
constexpr std::size_t kBounceBytes = 1u << 20;  ///< one transfer through the bounce buffer
constexpr std::size_t kMeasured = 1u << 20;     ///< shorter reads say little of a disk's speed

bool congruent(std::uint64_t offset, const std::byte* address, std::size_t alignment) noexcept {
  return (reinterpret_cast<std::uintptr_t>(address) - offset) % alignment == 0;
}

template <class Write>
void naming_folder(const std::string& folder, std::uint64_t bytes, const Write& write) {
  try {
    write();
  } catch (const std::system_error& error) {
    throw SourceError("cannot write " + amount(bytes) + " to a file in '" + folder +
                      "': " + error.code().message() + "; make room there, or choose another folder");
  }
}

std::optional<std::size_t> transfer(const OpenFile& file, std::uint64_t offset,
                                    std::span<const OpenFile::Part> parts) {
  const NoFork no_fork;
  return file.read_direct(offset, parts);
}

}  // namespace

std::shared_ptr<const File> File::open(const std::string& path) {
  try {
    return std::shared_ptr<const File>(new File(path));
  } catch (const std::system_error& error) {
    throw SourceError("cannot open the checkpoint file '" + path + "': " + error.code().message());
  }
}

File::File(const std::string& path) : path_(path), file_(path) {
  const OpenFile::Status status = file_.status();
  if (!status.is_ordinary)
    throw SourceError("cannot read weights from '" + path + "': it is not an ordinary file");
  size_ = status.size;
  inode_ = status.inode;
  device_ = status.device;
  modified_ns_ = status.modified_ns;
  admission_ = std::make_unique<Admission>(size_);
  ask_for_direct_transfers();
}

std::shared_ptr<const File> File::scratch(const std::string& folder, Keep keep) {
  try {
    return std::shared_ptr<const File>(new File(OpenFile::Scratch(), folder, keep));
  } catch (const std::system_error& error) {
    throw SourceError("cannot make a file in '" + folder + "': " + error.code().message());
  }
}

File::File(OpenFile::Scratch scratch, const std::string& folder, Keep keep)
    : path_(folder),
      file_(scratch, folder),
      size_(std::numeric_limits<std::uint64_t>::max()),
      scratch_(keep),
      admission_(std::make_unique<Admission>(0)) {
  ask_for_direct_transfers();
}

void File::reserve(std::uint64_t offset, std::uint64_t bytes) const {
  naming_folder(path_, bytes, [&] { file_.reserve(offset, bytes); });
}

void File::write(std::uint64_t offset, const std::byte* src, std::size_t bytes) const {
  naming_folder(path_, bytes, [&] {
    for (std::size_t done = 0; done < bytes;) done += write_some(offset + done, src + done, bytes - done);
  });
}

std::size_t File::write_some(std::uint64_t offset, const std::byte* src, std::size_t bytes) const {
  if (!writes_directly()) {
    file_.write(offset, src, bytes);
    return bytes;
  }
  const std::size_t alignment = file_.direct_offset_alignment();
  const bool in_place = congruent(0, src, file_.direct_memory_alignment()) && bytes >= alignment;
  thread_local const AlignedBuffer bounce(kBounceBytes);
  const std::size_t some = in_place ? align_down(bytes, alignment) : std::min(bytes, kBounceBytes);
  if (!in_place) std::memcpy(bounce.data(), src, some);
  const std::optional<std::size_t> put =
      file_.write_direct(offset, in_place ? src : bounce.data(), align_up(some, alignment));
  if (put) return std::min(*put, some);
  direct_.store(false, std::memory_order_relaxed);
  return write_some(offset, src, bytes);
}

void File::ask_for_direct_transfers() {
  // Zero: no direct transfers. More than a page: a disk that we have no buffers for.
  const std::size_t memory = file_.direct_memory_alignment(), offsets = file_.direct_offset_alignment();
  direct_ = memory != 0 && memory <= kDirectAlign && offsets <= kDirectAlign;
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
    throw SourceError(where() + " lies beyond the end of the file, which has " + amount(size_) +
                      ": the file is truncated; get a complete copy and load it again");
  }
  std::size_t done = 0;
  while (done < bytes) {
    const std::uint64_t at = offset + done;
    // Windows end where blocks end, so that no block is read twice.
    const std::size_t window =
        std::min<std::uint64_t>(bytes - done, align_down(at + kWindowBytes, kDirectAlign) - at);
    std::string reason = "the file ended early";
    try {
      end_read_ahead_if_bounded();
      const std::size_t got = read_some(at, dst + done, window, read_path(at, window, keep, mode));
      done += got;
      if (got > 0) continue;
    } catch (const std::system_error& error) {
      reason = error.code().message();
    }
    check_unchanged(who);
    throw SourceError(where() + " could not be read: " + reason +
                      "; check the disk, and load the file again");
  }
  // After the bytes were read, so that no change before or during the read goes unseen.
  check_unchanged(who);
}

void File::check_unchanged(const std::string& who) const {
  if (scratch_) return;
  OpenFile::Status status;
  try {
    status = file_.status();
  } catch (const std::system_error& error) {
    throw SourceError("weight '" + who + "': '" + path_ + "' cannot be checked: " + error.code().message());
  }
  const std::uint64_t size = status.size;
  if (size == size_ && status.modified_ns == modified_ns_) return;
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

/// The system reads ahead by megabytes, which would all stay in the page cache.
void File::end_read_ahead_if_bounded() const noexcept {
  if (bounded_.load(std::memory_order_relaxed) || !HostMemory::named()) return;
  bounded_.store(true, std::memory_order_relaxed);
  file_.end_read_ahead();
}

File::ReadPath File::read_path(std::uint64_t offset, std::size_t bytes, Keep keep,
                               ReadMode mode) const noexcept {
  const bool may_stay = keep != Keep::no;
  if (may_stay && bytes < kSmallRead && admission_->charge(offset, bytes)) return ReadPath::enter;
  const bool quick = mode == ReadMode::quick;
  const bool cached = file_.is_cached(offset, bytes);
  if (cached && quick) return ReadPath::copy;
  if (!cached && quick && may_stay && admission_->admit(offset, bytes)) return ReadPath::enter;
  if (direct_.load(std::memory_order_relaxed)) return ReadPath::direct;
  if (cached) return ReadPath::copy;
  return may_stay && admission_->charge(offset, bytes) ? ReadPath::enter : ReadPath::through;
}

std::size_t File::read_some(std::uint64_t offset, std::byte* dst, std::size_t bytes, ReadPath path) const {
  const auto begin = std::chrono::steady_clock::now();
  std::size_t got = 0;
  if (path == ReadPath::direct) {
    const std::optional<std::size_t> read = read_direct(offset, dst, bytes);
    if (!read) {
      direct_.store(false, std::memory_order_relaxed);
      return read_some(offset, dst, bytes, ReadPath::through);
    }
    got = *read;
  } else {
    got = file_.read(offset, dst, bytes);
  }
  if (got >= kMeasured && path != ReadPath::copy) {
    admission_->took(path != ReadPath::direct, got, std::chrono::steady_clock::now() - begin);
  }
  if (path == ReadPath::through) file_.drop_cached(offset, got);
  return got;
}

std::optional<std::size_t> File::read_direct(std::uint64_t offset, std::byte* dst, std::size_t bytes) const {
  const std::size_t alignment = file_.direct_offset_alignment();
  const bool spans_a_boundary = align_up(offset, alignment) <= align_down(offset + bytes, alignment);
  if (spans_a_boundary && congruent(offset, dst, file_.direct_memory_alignment()))
    return read_in_place(offset, dst, bytes);
  thread_local const AlignedBuffer bounce(kBounceBytes + 2 * kDirectAlign);
  const std::uint64_t begin = align_down(offset, alignment);
  const std::size_t skip = offset - begin;
  // A scrap past the last transfer's end goes with it.
  const std::size_t wanted = bytes <= kBounceBytes + kDirectAlign - skip ? bytes : kBounceBytes - skip;
  const OpenFile::Part blocks{bounce.data(), align_up(skip + wanted, alignment)};
  const std::optional<std::size_t> got = transfer(file_, begin, {&blocks, 1});
  if (!got) return std::nullopt;
  if (*got <= skip) return 0;
  const std::size_t usable = std::min(*got - skip, wanted);
  std::memcpy(dst, bounce.data() + skip, usable);
  return usable;
}

std::optional<std::size_t> File::read_in_place(std::uint64_t offset, std::byte* dst,
                                               std::size_t bytes) const {
  const std::size_t alignment = file_.direct_offset_alignment();
  // Invariant: the range touches the end of a block, so that its first and last block are two.
  // One transfer: the block that holds the beginning, whole blocks in place, the block that holds the end.
  alignas(kDirectAlign) std::byte first[kDirectAlign];
  alignas(kDirectAlign) std::byte last[kDirectAlign];
  const std::uint64_t begin = align_down(offset, alignment);
  const std::size_t skip = offset - begin;
  const std::size_t head = skip == 0 ? 0 : alignment - skip;  // bytes of dst that come from `first`
  const std::size_t tail = (offset + bytes) % alignment;      // ... and from `last`
  const std::size_t whole = bytes - head - tail;
  OpenFile::Part parts[3];
  std::size_t count = 0;
  if (head > 0) parts[count++] = {first, alignment};
  if (whole > 0) parts[count++] = {dst + head, whole};
  if (tail > 0) parts[count++] = {last, alignment};
  const std::optional<std::size_t> got = transfer(file_, begin, {parts, count});
  if (!got) return std::nullopt;
  if (*got <= skip) return 0;
  const std::size_t usable = std::min(*got - skip, bytes);
  std::memcpy(dst, first + skip, std::min(head, usable));
  if (usable > head + whole) std::memcpy(dst + head + whole, last, usable - head - whole);
  return usable;
}

}  // namespace dynswap
