// Whether a master's bytes have been written to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "core/source.h"
#include "io/elements.h"
#include "platform/fork_safe.h"
#include "platform/page_watch.h"

namespace dynswap {

/// Counts the writes to one range of memory, by any code of this process. The kernel watches its whole pages
/// (PageWatch). What shares a page with other data, and small ranges, are hashed. A private file mapping that
/// has not been written to is not touched. Where the kernel watches no pages, ranges of more than 64 KiB are
/// sampled: a few places of them are hashed (see exact()). What is written to the gaps between elements,
/// where others' elements may be, does not count. Memory that is gone counts as written (Note [A mapping
/// outlives its file's end]); nothing is thrown. Thread-safe.
class MemoryWatch {
 public:
  explicit MemoryWatch(const Source& source);
  MemoryWatch(const void* address, std::size_t bytes);
  /// Watches the elements. `mapped`: from a file.
  MemoryWatch(Elements elements, bool mapped);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;
  /// A watch of memory that no other process can have, so that the kernel need not be asked.
  static std::unique_ptr<MemoryWatch> of_private(const void* address, std::size_t bytes);

  /// Looks for writes, and returns a count that differs from the last one if any was made since.
  std::uint64_t writes();
  /// The count of a watch that is new and that nobody else has: only a file's memory needs a look.
  std::uint64_t first_writes() { return file_ ? writes() : writes_; }
  /// Counts a write that was made, or is about to be, unless a look sees every write.
  void note_write();
  /// Announces that much is about to be written. See PageWatch::expect_writes().
  void expect_writes();
  /// Note [To page-lock is to write]
  /// A driver takes the pages that it locks for writing, and to the kernel that is a write to each of them.
  /// If it counted, all that had been read ahead would be copied once more, and what was written on a tensor
  /// that was handed out would be dropped, as its master seems to have changed. So one looks before the
  /// locking, and what is seen after it counts only if the bytes are others. They are compared where somebody
  /// has a copy of them (`copied`, or another watch over the pages): else any copy will be of what is there
  /// then.
  void before_pinning(bool copied);
  void after_pinning();
  /// The memory is page-locked. A device may write to it, which the kernel does not see, so it is sampled
  /// too.
  void note_pinned();
  std::size_t size() const noexcept { return bytes_; }
  /// Whether every write by this process's code is seen.
  bool exact();
  /// Whether the count tells of every write, a device's to page-locked memory too: then no version has to.
  bool decides();

 private:
  struct Range {
    const std::byte* address = nullptr;
    std::size_t bytes = 0;
  };

  enum class OtherOwners : bool { none, unknown };
  MemoryWatch(Elements elements, bool mapped, OtherOwners others);
  void start(OtherOwners others = OtherOwners::unknown);
  std::unique_lock<Mutex> locked();
  void abandon() noexcept;
  bool sees_all() const noexcept { return middle_.bytes == 0 || (pages_ != nullptr && !shared_); }
  bool written_before_start(const File& file) const;
  bool look();
  bool look_at_pages();
  bool is_sampled() const noexcept { return !sees_all() || (pinned_ && middle_.bytes > 0); }
  // None of these is equal to anything if the memory is gone.
  std::optional<std::uint64_t> hash() const;
  std::optional<std::uint64_t> sample() const;
  std::optional<std::uint64_t> hash_elements() const;
  std::optional<std::uint64_t> hash_all() const;

  Mutex mutex_;
  // LOCK: mutex_ guards all below.
  const Elements elements_;
  const std::byte* const address_;  ///< of the first element
  const std::size_t bytes_;         ///< gaps included
  const bool mapped_;
  const bool copied_on_write_;  ///< all of it is a private mapping, of one range of a file or of several
  std::shared_ptr<const File> file_;  ///< of which it is a private mapping, not written to yet
  const std::uint64_t offset_;        ///< in the file
  bool pinned_;
  Range head_, middle_, tail_;  ///< the middle's pages are watched or sampled; a small range is all head
  std::shared_ptr<PageWatch> pages_;
  std::uint64_t page_writes_ = 0;
  std::optional<std::uint64_t> hash_, sample_;
  std::optional<std::uint64_t> of_elements_;     ///< the hash of all elements, if there are gaps
  std::optional<std::uint64_t> before_pinning_;  ///< the hash of all bytes, if they are compared
  std::uint64_t writes_ = 0;
  bool shared_ = false;  ///< with other processes, whose writes the kernel does not tell
};

/// A hash of a few words, evenly spread: it tells of what changes all of the bytes, not of a single element.
std::uint64_t sampled_hash(const std::byte* data, std::size_t bytes) noexcept;

}  // namespace dynswap
