// An open file, as the operating system reads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace dynswap {

/// Thread-safe. What fails throws std::system_error.
class OpenFile {
 public:
  struct Status {
    bool is_ordinary = false;  ///< neither a folder nor a device
    std::uint64_t size = 0;
    std::uint64_t inode = 0;
    std::uint64_t device = 0;
    std::int64_t modified_ns = 0;
  };
  struct Part {
    std::byte* address = nullptr;
    std::size_t bytes = 0;
  };

  /// `path` is UTF-8.
  explicit OpenFile(const std::string& path);
  /// A new file without a name in `folder`, to be written and read. It goes with this object, also if the
  /// process is killed.
  struct Scratch {};
  OpenFile(Scratch, const std::string& folder);
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  Status status() const;

  /// Reserves disk space for a range; of a Scratch alone. No effect where the file system cannot.
  void reserve(std::uint64_t offset, std::uint64_t bytes) const;

  /// Writes all bytes; of a Scratch alone. Makes the file longer if need be.
  void write(std::uint64_t offset, const std::byte* src, std::size_t bytes) const;

  /// Writes at least one and at most `bytes` bytes past the page cache; of a Scratch alone. Returns how many;
  /// nothing if the file system refuses such writes after all.
  std::optional<std::size_t> write_direct(std::uint64_t offset, const std::byte* src,
                                          std::size_t bytes) const;

  /// Reads at least one and at most `bytes` bytes, through the page cache; returns how many, and 0 at the end
  /// of the file.
  std::size_t read(std::uint64_t offset, std::byte* dst, std::size_t bytes) const;

  /// What transfers past the page cache ask of addresses, and of offsets and lengths. Both zero: there are
  /// none on this file system, and nowhere on Windows.
  std::size_t direct_memory_alignment() const noexcept { return memory_alignment_; }
  std::size_t direct_offset_alignment() const noexcept { return offset_alignment_; }

  /// Reads past the page cache into the parts, one after the other, and returns what read() would. Nothing if
  /// the file system refuses such reads after all.
  std::optional<std::size_t> read_direct(std::uint64_t offset, std::span<const Part> parts) const;

  /// Whether more than half of a range can be copied from the page cache: past that, copying what is there
  /// saves more time than waiting for the rest costs. False where the system does not tell.
  bool is_cached(std::uint64_t offset, std::size_t bytes) const noexcept;

  /// Takes the pages of a range out of the page cache, those at its ends included, as far as nobody has
  /// changed or mapped them. No effect where the system cannot.
  void drop_cached(std::uint64_t offset, std::size_t bytes) const noexcept;

  /// Has reads bring no more into the page cache than was asked for. No effect where the system cannot.
  void end_read_ahead() const noexcept;

 private:
  void open_for_direct_transfers(int access);

  std::intptr_t handle_ = -1;
  std::intptr_t direct_ = -1;  ///< the same file, for transfers past the page cache
  std::size_t memory_alignment_ = 0;
  std::size_t offset_alignment_ = 0;
};

}  // namespace dynswap
