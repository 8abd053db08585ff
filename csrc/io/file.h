// An open checkpoint file: reads ranges of it at the speed of the disk, or of the page cache.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/source.h"
#include "io/page_cache.h"
#include "io/read_policy.h"
#include "platform/open_file.h"

namespace dynswap {

/// Below, a range is better in the page cache than read past it.
inline constexpr std::size_t kSmallRead = 64u << 10;

/// Immutable and thread-safe. What the file was when it was opened (size, time of its last change) is what
/// it has to be at every read: weights that have changed under a running model are an error, not weights.
class File {
 public:
  /// Throws SourceError that names the file.
  static std::shared_ptr<const File> open(const std::string& path);
  /// A file without a name in `folder`, for bytes of this process. With Keep::no, and where the file system
  /// can, they are written past the page cache. Throws SourceError that names the folder.
  static std::shared_ptr<const File> scratch(const std::string& folder, Keep keep);

  /// Reserves disk space for a range, where the file system can; scratch() files only. Throws SourceError
  /// that names the folder (the disk is full).
  void reserve(std::uint64_t offset, std::uint64_t bytes) const;
  /// Writes bytes at `offset`; scratch() files only. What follows them in their last block of kDirectAlign
  /// may be overwritten. Nobody reads them meanwhile. Throws SourceError that names the folder.
  void write(std::uint64_t offset, const std::byte* src, std::size_t bytes) const;
  /// Whether write() goes past the page cache.
  bool writes_directly() const noexcept {
    return scratch_ == Keep::no && direct_.load(std::memory_order_relaxed);
  }

  File(const File&) = delete;
  File& operator=(const File&) = delete;

  /// Reads exactly `bytes` at `offset` into `dst`; blocks. `who` is the weight's name, for the error.
  /// Throws SourceError that names file and weight, what is wrong (truncated, changed, failing disk) and
  /// what to do.
  ///
  /// Note [How a range is read]: what is in the page cache is copied from there, unless cheap is better than
  /// quick (io/read_policy.h, Note [Quick or cheap]). The rest is read past the page cache (O_DIRECT),
  /// straight to `dst` if address and offset are congruent modulo the disk's memory alignment (modulo 4096 is
  /// always enough), else through a bounce buffer. With Keep::yes, small ranges and what is read again and
  /// again enter the page cache (io/page_cache.h, Note [What enters the page cache]). With Keep::no nothing
  /// does, nor what the account of the host's memory has no room for: where the file system refuses O_DIRECT,
  /// that is read through the cache and taken out of it.
  void read(std::uint64_t offset, std::byte* dst, std::size_t bytes, const std::string& who, Keep keep,
            ReadMode mode) const;

  /// Whether the page cache has most of a range. Does not wait for the disk.
  bool is_cached(std::uint64_t offset, std::size_t bytes) const noexcept {
    return file_.is_cached(offset, bytes);
  }

  const std::string& path() const noexcept { return path_; }
  std::uint64_t size() const noexcept { return size_; }
  std::uint64_t inode() const noexcept { return inode_; }
  std::uint64_t device() const noexcept { return device_; }

 private:
  explicit File(const std::string& path);
  File(OpenFile::Scratch scratch, const std::string& folder, Keep keep);
  void ask_for_direct_transfers();

  enum class ReadPath {
    copy,     ///< from the page cache
    enter,    ///< from the disk, through the page cache, and left there
    through,  ///< from the disk, through the page cache, and taken out of it
    direct,   ///< from the disk, past the page cache
  };
  void end_read_ahead_if_bounded() const noexcept;
  ReadPath read_path(std::uint64_t offset, std::size_t bytes, Keep keep, ReadMode mode) const noexcept;

  /// The functions below read at least one and at most `bytes` bytes and return how many, and 0 at the end of
  /// the file. Nothing if the file system refuses direct reads. They throw std::system_error.
  std::size_t read_some(std::uint64_t offset, std::byte* dst, std::size_t bytes, ReadPath path) const;
  std::optional<std::size_t> read_direct(std::uint64_t offset, std::byte* dst, std::size_t bytes) const;
  std::optional<std::size_t> read_in_place(std::uint64_t offset, std::byte* dst, std::size_t bytes) const;
  /// Writes at least one and at most `bytes` bytes, and returns how many.
  std::size_t write_some(std::uint64_t offset, const std::byte* src, std::size_t bytes) const;
  void check_unchanged(const std::string& who) const;

  const std::string path_;
  const OpenFile file_;
  std::uint64_t size_ = 0;
  std::uint64_t inode_ = 0;
  std::uint64_t device_ = 0;
  std::int64_t modified_ns_ = 0;
  const std::optional<Keep> scratch_;         ///< set: this process changes it
  mutable std::atomic<bool> direct_{false};   ///< direct transfers have not been refused yet
  mutable std::atomic<bool> bounded_{false};  ///< what is read ahead would exceed a bound that was named
  std::unique_ptr<Admission> admission_;      ///< shared by all readers; thread-safe
};

}  // namespace dynswap
