// What the engine counts. Bytes are bytes, times are nanoseconds of the host's monotonic clock.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dynswap {

struct Stats {
  std::uint64_t hits = 0;               ///< groups found on the device or on their way when they were needed
  std::uint64_t late_hits = 0;          ///< of those, on their way but not there yet
  std::uint64_t misses = 0;             ///< groups whose copy was issued only when they were needed
  std::uint64_t prefetches = 0;         ///< copies issued ahead of need
  std::uint64_t wasted_prefetches = 0;  ///< of those, overwritten before anybody read them
  std::uint64_t refetches = 0;          ///< copies thrown away because their master had changed
  std::uint64_t copies = 0;             ///< copies issued
  std::uint64_t bytes_moved = 0;        ///< bytes read from masters by those copies
  std::uint64_t stall_ns = 0;           ///< time the calling threads were blocked in Backend::wait
  std::uint64_t overflow_bytes = 0;     ///< most bytes outside the arena at one time
  std::uint64_t peak_bytes = 0;         ///< most device bytes held at one time (arena, residents, overflow)
  std::uint64_t given_way = 0;          ///< residents whose memory went to others (Note [Residents give way])
  std::uint64_t given_way_bytes = 0;    ///< and their bytes
  std::uint64_t host_synchronisations = 0;
  // The plan.
  std::uint64_t groups = 0;
  std::uint64_t resident_groups = 0;
  std::uint64_t weight_bytes = 0;  ///< device bytes of all weights
  std::uint64_t resident_bytes = 0;
  std::uint64_t arena_bytes = 0;
  std::uint64_t depth = 0;  ///< groups that the arena holds ahead of the current one
  // Now.
  std::uint64_t live_leases = 0;
  std::uint64_t pinned_bytes = 0;  ///< of masters that the device reads page-locked
  std::uint64_t staged_bytes = 0;  ///< of masters in RAM that go through a staging buffer
  std::uint64_t mapped_bytes = 0;  ///< of masters that are read from their files

  /// Goes on counting from where another engine of the same install ended.
  void add_counters(const Stats& earlier) noexcept {
    hits += earlier.hits;
    late_hits += earlier.late_hits;
    misses += earlier.misses;
    prefetches += earlier.prefetches;
    wasted_prefetches += earlier.wasted_prefetches;
    refetches += earlier.refetches;
    copies += earlier.copies;
    bytes_moved += earlier.bytes_moved;
    stall_ns += earlier.stall_ns;
    overflow_bytes = std::max(overflow_bytes, earlier.overflow_bytes);
    peak_bytes = std::max(peak_bytes, earlier.peak_bytes);
    given_way += earlier.given_way;
    given_way_bytes += earlier.given_way_bytes;
    host_synchronisations += earlier.host_synchronisations;
  }
};

}  // namespace dynswap
