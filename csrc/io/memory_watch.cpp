#include "io/memory_watch.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "core/check.h"
#include "io/file.h"
#include "io/hash.h"
#include "io/private_pages.h"
#include "platform/mapped_memory.h"
#include "platform/pagemap.h"

namespace dynswap {

namespace {

/// Ranges of this size and more are watched by the kernel. Asking it takes 0.3 to 0.8 us, in which 10 to 30
/// KiB could be hashed, and each range that it watches adds entries to its list of mappings.
constexpr std::size_t kWatchedBytes = 32u << 10;
/// Where the kernel does not watch them, larger ranges are sampled.
constexpr std::size_t kHashedBytes = 64u << 10;

bool is_shared(const std::byte* address, std::size_t bytes, bool mapped) {
  bool is_private = false;
  if (mapped) {
    std::byte present;
    if (!read_mapped(address, &present, 1)) return false;
  } else {
    volatile std::byte present = *address;
    static_cast<void>(present);
  }
  const bool told =
      find_private(pages_around(address, std::min<std::size_t>(bytes, 1)), [&](Pages) { is_private = true; });
  return told && !is_private;
}

/// Adds bytes that may be gone; false if they are.
bool add_mapped(Hash& hash, const std::byte* data, std::size_t bytes) noexcept {
  std::array<std::byte, 8192> copy;
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t length = std::min(bytes - done, copy.size());
    if (!read_mapped(data + done, copy.data(), length)) return false;
    hash.add(copy.data(), length);
    done += length;
  }
  return true;
}

bool add(Hash& hash, const std::byte* data, std::size_t bytes, bool mapped) noexcept {
  if (mapped) return add_mapped(hash, data, bytes);
  hash.add(data, bytes);
  return true;
}

std::optional<std::uint64_t> sampled(const std::byte* data, std::size_t bytes, bool mapped) noexcept {
  constexpr std::size_t kWords = 16;
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  std::array<std::byte, kWords * kWord> words;
  Hash hash;
  if (bytes <= words.size()) {
    if (!add(hash, data, bytes, mapped)) return std::nullopt;
    return hash.value();
  }
  for (std::size_t i = 0; i < kWords; ++i) {
    const std::byte* const word = data + (bytes - kWord) / (kWords - 1) * i;
    if (!mapped) {
      std::memcpy(words.data() + i * kWord, word, kWord);
    } else if (!read_mapped(word, words.data() + i * kWord, kWord)) {
      return std::nullopt;
    }
  }
  hash.add(words.data(), words.size());
  return hash.value();
}

/// Whether two hashes are equal, and neither was of bytes that are gone.
bool same(std::optional<std::uint64_t> a, std::optional<std::uint64_t> b) noexcept {
  return a && b && *a == *b;
}

}  // namespace

std::uint64_t sampled_hash(const std::byte* data, std::size_t bytes) noexcept {
  return *sampled(data, bytes, /*mapped=*/false);
}

MemoryWatch::MemoryWatch(const Source& source)
    : elements_(dense_elements(source.address, source.stored_bytes())),
      address_(source.address),
      bytes_(source.stored_bytes()),
      mapped_(source.mapped),
      copied_on_write_(source.from_files()),
      file_(source.file),
      offset_(source.offset),
      pinned_(source.pinned) {
  if (!file_) start(source.allocated ? OtherOwners::none : OtherOwners::unknown);
}

MemoryWatch::MemoryWatch(const void* address, std::size_t bytes)
    : MemoryWatch(dense_elements(address, bytes), /*mapped=*/false) {}

MemoryWatch::MemoryWatch(Elements elements, bool mapped)
    : MemoryWatch(std::move(elements), mapped, OtherOwners::unknown) {}

MemoryWatch::MemoryWatch(Elements elements, bool mapped, OtherOwners others)
    : elements_(std::move(elements)),
      address_(elements_.address),
      bytes_(elements_.bytes),
      mapped_(mapped),
      copied_on_write_(false),
      offset_(0),
      pinned_(false) {
  start(others);
}

std::unique_ptr<MemoryWatch> MemoryWatch::of_private(const void* address, std::size_t bytes) {
  return std::unique_ptr<MemoryWatch>(
      new MemoryWatch(dense_elements(address, bytes), /*mapped=*/false, OtherOwners::none));
}

/// A forked child may have a watch that another thread of the parent was looking through: it starts again.
/// What was written before is not seen there, and need not be, as the child's copies are made later.
std::unique_lock<Mutex> MemoryWatch::locked() {
  std::unique_lock lock(mutex_);
  if (mutex_.take_interrupted()) {
    abandon();
    start();
  }
  return lock;
}

void MemoryWatch::abandon() noexcept {
  new auto(std::move(pages_));
  new auto(std::move(file_));
  head_ = middle_ = tail_ = {};
}

MemoryWatch::~MemoryWatch() {
  const std::lock_guard lock(mutex_);
  if (mutex_.take_interrupted()) abandon();
}

void MemoryWatch::start(OtherOwners others) {
  if (address_ == nullptr || bytes_ == 0) return;
  shared_ = others == OtherOwners::unknown && !copied_on_write_ && is_shared(address_, bytes_, mapped_);
  head_ = {address_, bytes_};
  const Pages whole = pages_within(address_, bytes_);
  if (whole.end - whole.begin >= kWatchedBytes)
    pages_ = PageWatch::over(whole, copied_on_write_ ? PageSelection::private_only : PageSelection::all);
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
  of_elements_ = hash_elements();
}

/// Only bytes in this process's private pages can have been written. A page on which other masters lie too
/// may be private because of them: there the bytes are compared with the file.
bool MemoryWatch::written_before_start(const File& file) const {
  const Pages whole = pages_within(address_, bytes_);
  const bool has_whole = whole.begin < whole.end;
  const auto from = reinterpret_cast<std::uintptr_t>(address_);
  for (const ByteRange& range : private_ranges(address_, bytes_)) {
    if (has_whole && from + range.begin < whole.end && from + range.end > whole.begin) return true;
    std::vector<std::byte> as_in_file(range.end - range.begin), now(range.end - range.begin);
    try {
      file.read(offset_ + range.begin, as_in_file.data(), as_in_file.size(), "a weight", Keep::yes,
                ReadMode::quick);
    } catch (const SourceError&) {
      return true;  // whoever copies the weight then is told
    }
    if (!read_mapped(address_ + range.begin, now.data(), now.size()) || now != as_in_file) return true;
  }
  return false;
}

std::uint64_t MemoryWatch::writes() {
  const auto lock = locked();
  if (address_ == nullptr) return writes_;
  bool written = false;
  if (file_) {
    if (private_ranges(address_, bytes_).empty()) return writes_;
    start();
    const std::shared_ptr<const File> file = std::exchange(file_, nullptr);
    written = written_before_start(*file);
  } else {
    written = look();
    if (written && elements_.has_gaps()) {  // or somebody has written to what lies in the gaps
      const auto now = hash_elements();
      written = !same(std::exchange(of_elements_, now), now);
    }
  }
  if (written) ++writes_;
  return writes_;
}

/// Whether anything has changed between the first element and the last.
bool MemoryWatch::look() {
  bool written = look_at_pages();
  if (const auto now = hash(); !same(std::exchange(hash_, now), now)) written = true;
  if (const auto now = sample(); !same(std::exchange(sample_, now), now)) written = true;
  return written;
}

bool MemoryWatch::look_at_pages() {
  if (!pages_) return false;
  const std::optional<std::uint64_t> now = pages_->writes();
  if (!now) {
    // Other memory has been mapped there; or this is a forked child, where what the parent handed out is the
    // child's own: a write on it would be dropped if the master counted as written.
    const bool remapped = pages_->of_this_process();
    pages_ = PageWatch::over(pages_within(middle_.address, middle_.bytes), PageSelection::all);
    if (pages_) page_writes_ = pages_->writes().value_or(0);
    return remapped;
  }
  return std::exchange(page_writes_, *now) != *now;
}

/// The hash of the ends of the range, which the kernel does not watch; nothing if they are gone.
std::optional<std::uint64_t> MemoryWatch::hash() const {
  Hash hash;
  if (!add(hash, head_.address, head_.bytes, mapped_) || !add(hash, tail_.address, tail_.bytes, mapped_))
    return std::nullopt;
  return hash.value();
}

/// The hash of samples of the middle of the range, if the kernel does not tell of every write to it; nothing
/// if it is gone.
std::optional<std::uint64_t> MemoryWatch::sample() const {
  return is_sampled() ? sampled(middle_.address, middle_.bytes, mapped_) : 0;
}

std::optional<std::uint64_t> MemoryWatch::hash_elements() const {
  if (!elements_.has_gaps()) return 0;
  std::vector<std::byte> copy(mapped_ ? bytes_ : 0);
  if (mapped_ && !read_mapped(address_, copy.data(), bytes_)) return std::nullopt;
  Hash hash;
  for_each_run(elements_, mapped_ ? copy.data() : address_,
               [&](const std::byte* run) { hash.add(run, elements_.run); });
  return hash.value();
}

void MemoryWatch::note_write() {
  const auto lock = locked();
  if (!sees_all()) ++writes_;
}

void MemoryWatch::expect_writes() {
  const auto lock = locked();
  if (pages_) pages_->expect_writes();
}

std::optional<std::uint64_t> MemoryWatch::hash_all() const {
  Hash hash;
  if (!add(hash, address_, bytes_, mapped_)) return std::nullopt;
  return hash.value();
}

void MemoryWatch::before_pinning(bool copied) {
  writes();
  const auto lock = locked();
  before_pinning_.reset();
  if (pages_ && (copied || pages_.use_count() > 1)) before_pinning_ = hash_all();
}

void MemoryWatch::after_pinning() {
  const auto lock = locked();
  const auto before = std::exchange(before_pinning_, std::nullopt);
  if (pages_ && (!before || same(before, hash_all()))) pages_->discard_writes();
}

void MemoryWatch::note_pinned() {
  const auto lock = locked();
  const bool sampled = is_sampled();
  pinned_ = true;
  if (!sampled && !file_ && address_ != nullptr) sample_ = sample();
}

bool MemoryWatch::exact() {
  const auto lock = locked();
  return sees_all();
}

bool MemoryWatch::decides() {
  const auto lock = locked();
  return !is_sampled();
}

}  // namespace dynswap
