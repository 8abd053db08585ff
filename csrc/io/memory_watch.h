// Whether somebody has written to a master's bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "core/source.h"
#include "io/page_watch.h"

namespace dynswap {

/// Counts the writes to one range of memory, whoever makes them. Exact, where exact() says so: whole pages
/// are watched by the kernel (PageWatch); what lies in a page with something else, and what is small, is
/// hashed; a file mapping that nobody has written to is not touched. Where the kernel watches no pages, large
/// ranges are hashed in a few places only. Thread-safe.
class MemoryWatch {
 public:
  explicit MemoryWatch(const Source& source);
  MemoryWatch(const void* address, std::size_t bytes);

  /// Looks. A number that is another one than before if something has been written since.
  std::uint64_t writes();
  /// Somebody has written, or is about to: counted, unless looking sees every write by itself.
  void note_write();
  /// Much is about to be written. See PageWatch::expect_writes().
  void expect_writes();
  /// The memory is its owner's again: it is not looked at any more.
  void stop();
  /// A device may write to it, by itself.
  void note_pinned();
  /// No write goes unseen.
  bool exact();

 private:
  struct Range {
    const std::byte* address = nullptr;
    std::size_t bytes = 0;
  };

  void start();
  bool sees_all() const noexcept { return middle_.bytes == 0 || (pages_ != nullptr && !shared_); }
  bool written_before_start(const File& file) const;
  bool look_at_pages();
  std::uint64_t hash() const;

  std::mutex mutex_;
  // LOCK: mutex_ guards all below.
  const std::byte* address_;
  const std::size_t bytes_;
  std::shared_ptr<const File> file_;  ///< of which it is a private mapping that nobody has written to
  const std::uint64_t offset_;        ///< in the file
  bool pinned_;
  Range head_, middle_, tail_;  ///< the middle's pages are watched; only the head has bytes, if none are
  std::shared_ptr<PageWatch> pages_;
  std::uint64_t page_writes_ = 0;
  std::uint64_t hash_ = 0;
  std::uint64_t writes_ = 0;
  bool shared_ = false;  ///< with other processes, whose writes no page of this one tells
};

/// A hash of a few words, evenly spread: it tells of what changes all of the bytes, not of a single element.
std::uint64_t sampled_hash(const std::byte* data, std::size_t bytes) noexcept;

}  // namespace dynswap
