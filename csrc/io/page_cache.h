// Which ranges of a file enter the page cache.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/host_memory.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// Note [What enters the page cache]: a range that is read once is read past the cache. That is what reaches
/// the speed of the disk at the least CPU time, and a model that is run once displaces nothing. A range that
/// is read a second time will be read again, and enters the cache with that read (LRU-2 admits so, O'Neil et
/// al. 1993): from the third pass on it comes at the speed of memory. It does not where this detour is seen
/// to be so slow that more than kPayback passes would be needed to win the time back. Nor does it where the
/// account of the host's memory has no room (core/host_memory.h). Where a user has named an amount, the
/// system reads nothing ahead, which would not be in the account.
///
/// Thread-safe.
class Admission {
 public:
  explicit Admission(std::uint64_t file_bytes);

  /// Whether a range that is not in the cache shall be read through it, as far as there is room for it
  /// (HostUse::page_cache). Remembers the range.
  bool admit(std::uint64_t offset, std::size_t bytes) noexcept;

  /// Whether there is room for a range that is read through the cache, which is taken: once for each block of
  /// the file, however often and in whatever ranges it is read.
  bool charge(std::uint64_t offset, std::size_t bytes) noexcept;

  /// Tells how long bytes took to come from the disk.
  void took(bool through_cache, std::size_t bytes, std::chrono::nanoseconds time) noexcept;

 private:
  /// Passes whose gain may be spent on filling the cache.
  static constexpr double kPayback = 3;
  /// Ranges are told apart by where they begin; those that admit() is asked about are no smaller.
  static constexpr std::uint64_t kBlockBytes = 64u << 10;
  /// What has to be read in a way before its speed counts.
  static constexpr std::uint64_t kEnoughBytes = 32u << 20;

  struct Speed {
    std::atomic<std::uint64_t> bytes{0};
    std::atomic<std::uint64_t> nanoseconds{0};

    bool known() const noexcept { return bytes >= kEnoughBytes; }
    double ns_per_byte() const noexcept {
      return static_cast<double>(nanoseconds) / static_cast<double>(bytes);
    }
  };

  using Blocks = std::vector<std::atomic<std::uint64_t>>;  ///< a bit for each
  static bool is_marked(const Blocks& blocks, std::uint64_t block) noexcept;
  /// Whether the bit of the block was set. Sets it.
  static bool mark(Blocks& blocks, std::uint64_t block) noexcept;

  const std::uint64_t file_bytes_;
  Blocks read_before_;
  Mutex charging_;
  Blocks charged_;  ///< LOCK: charging_, to set
  HostMemory::Charge charge_{HostUse::page_cache};
  Speed direct_;
  Speed through_cache_;
};

}  // namespace dynswap
