// Where in the device memory for streamed groups each of them lies. Pure bookkeeping: offsets, no bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/device_copy.h"

namespace dynswap {

/// Not thread-safe: the engine calls it under its mutex.
class Arena {
 public:
  /// A part of the arena. Regions cover it without gaps, in the order of their offsets.
  struct Region {
    std::size_t offset = 0;
    std::size_t bytes = 0;
    std::shared_ptr<DeviceCopy> occupant;  ///< null: free
    std::vector<EventPtr> after;           ///< free: may be written after these
  };

  /// How willingly an occupant is given up: the larger the better; nothing: it may not be.
  using Rank = std::function<std::optional<std::uint64_t>(const DeviceCopy&)>;

  explicit Arena(std::size_t bytes = 0);

  std::size_t bytes() const noexcept { return bytes_; }
  const std::vector<Region>& regions() const noexcept { return regions_; }

  /// Finds room for `copy->bytes` (free parts first, else the occupants that `rank` gives up most
  /// willingly), puts `copy` there, and returns what had been there, clipped to the slot: the caller
  /// detaches the occupants and waits for `after` before it writes. Empty if there is no room.
  std::vector<Region> place(const std::shared_ptr<DeviceCopy>& copy, const Rank& rank);

  /// Whether place() would find room.
  bool has_room(std::size_t bytes, const Rank& rank) const { return best_window(bytes, rank).has_value(); }

  /// Offset of a copy in the arena, which must hold it.
  std::size_t offset(const DeviceCopy& copy) const;

  /// Frees the copy's region; it may be written after `after`. No effect if it is not there.
  void vacate(const DeviceCopy& copy, std::vector<EventPtr> after);

 private:
  /// A run of neighbouring regions [first, last] that is large enough.
  struct Window {
    std::size_t first = 0;
    std::size_t last = 0;
    std::uint64_t rank = 0;  ///< of its least willing occupant
    std::size_t evicted_bytes = 0;

    bool better_than(const Window& other) const noexcept {
      return rank != other.rank ? rank > other.rank : evicted_bytes < other.evicted_bytes;
    }
  };
  std::optional<Window> best_window(std::size_t bytes, const Rank& rank) const;

  std::size_t bytes_ = 0;
  std::vector<Region> regions_;
};

/// The events after which a copy's memory may be overwritten, once no lease is left.
std::vector<EventPtr> overwrite_after(const DeviceCopy& copy);

}  // namespace dynswap
