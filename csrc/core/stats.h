// What the engine counts. Bytes are bytes, times are nanoseconds of the host's monotonic clock.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace dynswap {

struct Stats {
  std::uint64_t hits = 0;               ///< groups found on the device or on their way when they were needed
  std::uint64_t late_hits = 0;          ///< of those, on their way but not there yet
  std::uint64_t misses = 0;             ///< groups whose copy was issued only when they were needed
  std::uint64_t prefetches = 0;         ///< copies issued ahead of need
  std::uint64_t wasted_prefetches = 0;  ///< of those, overwritten before anybody read them, or guessed wrong
  std::uint64_t guesses = 0;            ///< of the prefetches, experts whose router had not chosen yet
  std::uint64_t right_guesses = 0;      ///< of those, chosen then
  std::uint64_t refetches = 0;          ///< copies thrown away because their master had changed
  std::uint64_t copies = 0;             ///< copies issued
  std::uint64_t bytes_moved = 0;        ///< bytes read from masters by those copies
  std::uint64_t bytes_decoded = 0;      ///< what they stand for: coded weights count as decoded
  std::uint64_t stall_ns = 0;           ///< time the calling threads were blocked in Backend::wait
  std::uint64_t overflow_bytes = 0;     ///< most bytes outside the arena at one time
  std::uint64_t peak_bytes = 0;         ///< most device bytes held at one time (arena, residents, overflow)
  std::uint64_t given_way = 0;          ///< residents whose memory went to others (Note [Residents give way])
  std::uint64_t given_way_bytes = 0;    ///< and their bytes
  std::uint64_t host_synchronisations = 0;
  // Of tensors that autograd saves.
  std::uint64_t offloaded_bytes = 0;   ///< copied to the host
  std::uint64_t restored_bytes = 0;    ///< brought back
  std::uint64_t saved_bytes = 0;       ///< most on the device at one time
  std::uint64_t saved_step_bytes = 0;  ///< that the latest step saved
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
  void add_counters(const Stats& earlier) noexcept;
  /// Sets the counters to 0. The plan and what is so now stay.
  void clear_counters() noexcept;
};

struct Stat {
  const char* name;
  std::uint64_t Stats::* figure;
  enum : std::uint8_t {
    total,  ///< a counter: an install adds up those of its engines, one after the other
    most,   ///< a maximum: an install has the largest of its engines
    state   ///< of the present plan, or of this moment
  } kind;
};

/// Each figure as Python has it (dynswap_ext/profile/stats.py).
inline constexpr auto kStats = std::to_array<Stat>({
    {"hits", &Stats::hits, Stat::total},
    {"late_hits", &Stats::late_hits, Stat::total},
    {"misses", &Stats::misses, Stat::total},
    {"prefetches", &Stats::prefetches, Stat::total},
    {"wasted_prefetches", &Stats::wasted_prefetches, Stat::total},
    {"guesses", &Stats::guesses, Stat::total},
    {"right_guesses", &Stats::right_guesses, Stat::total},
    {"refetches", &Stats::refetches, Stat::total},
    {"copies", &Stats::copies, Stat::total},
    {"bytes_moved", &Stats::bytes_moved, Stat::total},
    {"bytes_decoded", &Stats::bytes_decoded, Stat::total},
    {"stall_ns", &Stats::stall_ns, Stat::total},
    {"overflow_bytes", &Stats::overflow_bytes, Stat::most},
    {"peak_bytes", &Stats::peak_bytes, Stat::most},
    {"given_way", &Stats::given_way, Stat::total},
    {"given_way_bytes", &Stats::given_way_bytes, Stat::total},
    {"host_synchronisations", &Stats::host_synchronisations, Stat::total},
    {"offloaded_bytes", &Stats::offloaded_bytes, Stat::total},
    {"restored_bytes", &Stats::restored_bytes, Stat::total},
    {"saved_bytes", &Stats::saved_bytes, Stat::most},
    {"saved_step_bytes", &Stats::saved_step_bytes, Stat::state},
    {"groups", &Stats::groups, Stat::state},
    {"resident_groups", &Stats::resident_groups, Stat::state},
    {"weight_bytes", &Stats::weight_bytes, Stat::state},
    {"resident_bytes", &Stats::resident_bytes, Stat::state},
    {"arena_bytes", &Stats::arena_bytes, Stat::state},
    {"depth", &Stats::depth, Stat::state},
    {"live_leases", &Stats::live_leases, Stat::state},
    {"pinned_bytes", &Stats::pinned_bytes, Stat::state},
    {"staged_bytes", &Stats::staged_bytes, Stat::state},
    {"mapped_bytes", &Stats::mapped_bytes, Stat::state},
});
static_assert(kStats.size() * sizeof(std::uint64_t) == sizeof(Stats),
              "each figure of Stats needs a row in kStats");

inline void Stats::add_counters(const Stats& earlier) noexcept {
  for (const Stat& stat : kStats) {
    std::uint64_t& own = this->*stat.figure;
    if (stat.kind == Stat::total) own += earlier.*stat.figure;
    if (stat.kind == Stat::most) own = std::max(own, earlier.*stat.figure);
  }
}

inline void Stats::clear_counters() noexcept {
  for (const Stat& stat : kStats) {
    if (stat.kind != Stat::state) this->*stat.figure = 0;
  }
}

}  // namespace dynswap
