// What the engine counts for each group, and why anybody had to wait for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace dynswap {

/// Why a consumer waited for a copy.
enum class Cause : std::uint8_t {
  first_use,       ///< it had never been copied before
  bus_bound,       ///< it was issued in time, and the bus was busy with the copies before it
  late_prefetch,   ///< it was foreseen, but so late that the bus had been idle
  not_predicted,   ///< nothing had foreseen it
  arena_full,      ///< it was foreseen, but what had been fetched before it filled the arena
  slot_held,       ///< it was foreseen, but tensors still in use held the arena
  master_changed,  ///< its earlier copy was thrown away
  count            ///< not a cause: how many there are
};

constexpr const char* name_of(Cause cause) noexcept {
  constexpr std::array<const char*, static_cast<std::size_t>(Cause::count)> kNames{
      "first use",  "bus-bound", "late prefetch", "not predicted",
      "arena full", "slot held", "master changed"};
  return kNames[static_cast<std::size_t>(cause)];
}

/// Times are nanoseconds of Backend::now()'s clock.
struct GroupFigures {
  std::uint64_t hits = 0;
  std::uint64_t late_hits = 0;
  std::uint64_t misses = 0;
  std::uint64_t copies = 0;
  std::uint64_t bytes_moved = 0;
  std::optional<std::uint64_t> copy_ns;  ///< null: no copy was timed
  std::array<std::uint64_t, static_cast<std::size_t>(Cause::count)> stall_ns{};
  std::optional<std::uint32_t> held_by;  ///< the group whose tensors held its slot, the last time

  /// Counts what another group has counted, too.
  void add(const GroupFigures& other) {
    hits += other.hits;
    late_hits += other.late_hits;
    misses += other.misses;
    copies += other.copies;
    bytes_moved += other.bytes_moved;
    if (other.copy_ns) copy_ns = copy_ns.value_or(0) + *other.copy_ns;
    for (std::size_t i = 0; i < stall_ns.size(); ++i) stall_ns[i] += other.stall_ns[i];
  }
};

}  // namespace dynswap
