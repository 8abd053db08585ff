#include "io/memory_watch.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "io/file.h"
#include "io/pagemap.h"
#include "io/private_pages.h"

namespace dynswap {

namespace {

/// Ranges of this size and more are watched by the kernel. Asking it takes 0.8 us, in which 10 KiB could be
/// hashed, and each range that it watches adds entries to its list of mappings.
constexpr std::size_t kWatchedBytes = 32u << 10;
/// Where the kernel does not watch them, larger ranges are sampled.
constexpr std::size_t kHashedBytes = 64u << 10;

/// Four lanes, with one multiplication for each word; 12 GB/s. A write that changes one word of a lane is
/// never missed.
class Hash {
 public:
  void add(const std::byte* data, std::size_t bytes) noexcept {
    for (; bytes >= sizeof(lanes_); data += sizeof(lanes_), bytes -= sizeof(lanes_)) {
      std::array<std::uint64_t, 4> words;
      std::memcpy(words.data(), data, sizeof(words));
      for (std::size_t i = 0; i < words.size(); ++i) lanes_[i] = mix(lanes_[i], words[i]);
    }
    for (std::size_t lane = 0; bytes > 0; ++lane) {
      std::uint64_t word = 0;
      const std::size_t length = std::min(bytes, sizeof(word));
      std::memcpy(&word, data, length);
      lanes_[lane] = mix(lanes_[lane], word);
      data += length;
      bytes -= length;
    }
  }

  std::uint64_t value() const noexcept {
    std::uint64_t value = 0;
    for (const std::uint64_t lane : lanes_) value = mix(value, lane);
    return value;
  }

 private:
  static std::uint64_t mix(std::uint64_t hash, std::uint64_t word) noexcept {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    return hash ^ (hash >> 32);
  }

  std::array<std::uint64_t, 4> lanes_{1, 2, 3, 4};
};

bool is_shared(const std::byte* address, std::size_t bytes) {
  bool is_private = false;
  volatile std::byte present = *address;
  static_cast<void>(present);
  const bool told =
      find_private(pages_around(address, std::min<std::size_t>(bytes, 1)), [&](Pages) { is_private = true; });
  return told && !is_private;
}

}  // namespace

std::uint64_t sampled_hash(const std::byte* data, std::size_t bytes) noexcept {
  constexpr std::size_t kWords = 16;
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  Hash hash;
  if (bytes <= kWords * kWord) {
    hash.add(data, bytes);
  } else {
    for (std::size_t i = 0; i < kWords; ++i) hash.add(data + (bytes - kWord) / (kWords - 1) * i, kWord);
  }
  return hash.value();
}

MemoryWatch::MemoryWatch(const Source& source)
    : address_(source.address),
      bytes_(source.stored_bytes()),
      file_(source.file),
      offset_(source.offset),
      pinned_(source.pinned) {
  if (!file_) start();
}

MemoryWatch::MemoryWatch(const void* address, std::size_t bytes)
    : MemoryWatch(address, bytes, Sharing::unknown) {}

MemoryWatch::MemoryWatch(const void* address, std::size_t bytes, Sharing sharing)
    : address_(static_cast<const std::byte*>(address)), bytes_(bytes), offset_(0), pinned_(false) {
  start(sharing);
}

std::unique_ptr<MemoryWatch> MemoryWatch::of_private(const void* address, std::size_t bytes) {
  return std::unique_ptr<MemoryWatch>(new MemoryWatch(address, bytes, Sharing::none));
}

void MemoryWatch::start(Sharing sharing) {
  if (address_ == nullptr || bytes_ == 0) return;
  shared_ = sharing == Sharing::unknown && !file_ && is_shared(address_, bytes_);
  head_ = {address_, bytes_};
  const Pages whole = pages_within(address_, bytes_);
  if (whole.end - whole.begin >= kWatchedBytes)
    pages_ = PageWatch::over(whole, file_ ? PageSelection::private_only : PageSelection::all);
  if (pages_ || bytes_ > kHashedBytes) {
    const auto before = whole.begin - reinterpret_cast<std::uintptr_t>(address_);
    const std::size_t within = whole.end - whole.begin;
    head_.bytes = before;
    middle_ = {address_ + before, within};
    tail_ = {middle_.address + within, bytes_ - before - within};
  }
  if (pages_) page_writes_ = pages_->writes().value_or(0);
  hash_ = hash();
  sample_ = sample();
}

/// Only bytes in this process's private pages can have been written. A page on which other masters lie too
/// may be private because of them: there the bytes are compared with the file.
bool MemoryWatch::written_before_start(const File& file) const {
  const Pages whole = pages_within(address_, bytes_);
  const auto from = reinterpret_cast<std::uintptr_t>(address_);
  for (const ByteRange& range : private_ranges(address_, bytes_)) {
    if (from + range.begin < whole.end && from + range.end > whole.begin) return true;
    std::vector<std::byte> as_in_file(range.end - range.begin);
    file.read(offset_ + range.begin, as_in_file.data(), as_in_file.size(), "a weight", Keep::yes,
              ReadMode::quick);
    if (std::memcmp(as_in_file.data(), address_ + range.begin, as_in_file.size()) != 0) return true;
  }
  return false;
}

std::uint64_t MemoryWatch::writes() {
  const std::lock_guard lock(mutex_);
  if (address_ == nullptr) return writes_;
  bool written = false;
  if (file_) {
    if (private_ranges(address_, bytes_).empty()) return writes_;
    start();
    const std::shared_ptr<const File> file = std::exchange(file_, nullptr);
    written = written_before_start(*file);
  } else {
    written = look_at_pages();
    if (const std::uint64_t now = hash(); now != hash_) {
      hash_ = now;
      written = true;
    }
    if (const std::uint64_t now = sample(); now != sample_) {
      sample_ = now;
      written = true;
    }
  }
  if (written) ++writes_;
  return writes_;
}

bool MemoryWatch::look_at_pages() {
  if (!pages_) return false;
  const std::optional<std::uint64_t> now = pages_->writes();
  if (!now) {  // other memory has been mapped there
    pages_ = PageWatch::over(pages_within(middle_.address, middle_.bytes), PageSelection::all);
    if (pages_) page_writes_ = pages_->writes().value_or(0);
    hash_ = hash();
    sample_ = sample();
    return true;
  }
  return std::exchange(page_writes_, *now) != *now;
}

/// Of the ends, which the kernel does not watch.
std::uint64_t MemoryWatch::hash() const {
  Hash hash;
  hash.add(head_.address, head_.bytes);
  hash.add(tail_.address, tail_.bytes);
  return hash.value();
}

/// Of what lies between them, if the kernel does not tell of every write to it.
std::uint64_t MemoryWatch::sample() const {
  return is_sampled() ? sampled_hash(middle_.address, middle_.bytes) : 0;
}

void MemoryWatch::note_write() {
  const std::lock_guard lock(mutex_);
  if (!sees_all()) ++writes_;
}

void MemoryWatch::expect_writes() {
  const std::lock_guard lock(mutex_);
  if (pages_) pages_->expect_writes();
}

void MemoryWatch::note_pinned() {
  const std::lock_guard lock(mutex_);
  const bool sampled = is_sampled();
  pinned_ = true;
  if (!sampled && !file_ && address_ != nullptr) sample_ = sample();
}

bool MemoryWatch::exact() {
  const std::lock_guard lock(mutex_);
  return sees_all();
}

}  // namespace dynswap
