// One group's bytes on the device, and who stands in the way of overwriting them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/figures.h"

namespace dynswap {

/// Where a copy lives.
enum class Place : std::uint8_t {
  arena,     ///< a slot of the arena
  resident,  ///< the group's own block, for good
  overflow,  ///< memory outside the budget, freed with its last lease (Invariant 4)
  beside,    ///< memory of a short-lived group's own, freed with its last lease
};

/// LOCK: every field is guarded by the engine's mutex, except that `base`, `bytes` and `place` do not
/// change once the copy is issued.
struct DeviceCopy {
  enum class State : std::uint8_t { issuing, issued, failed };

  std::uint32_t group = 0;
  Place place = Place::arena;
  State state = State::issuing;
  Memory memory;  ///< keeps the block that `base` points into
  std::byte* base = nullptr;
  std::size_t bytes = 0;

  EventPtr copied;              ///< the end of the copy
  std::exception_ptr error;     ///< set with State::failed
  std::vector<Stream> waited;   ///< streams whose later work is ordered after `copied`
  std::vector<Stream> readers;  ///< streams that leases used since the last event was recorded

  /// Invariant: once `leases` is 0, the memory may be overwritten after all of these, and not before.
  /// One event a stream: a later one on the same stream implies the earlier.
  std::vector<std::pair<Stream, EventPtr>> released;

  std::uint32_t leases = 0;
  /// One of the group's weights in the copy, in the group's order.
  struct Part {
    std::uint32_t leases = 0;
    bool outdated = false;  ///< its master has changed: see Note [One outdated weight of a group]
    /// Note [What a lease leaves]. Invariant: null while there are leases on the part.
    std::shared_ptr<void> left;
  };
  std::vector<Part> parts;
  std::uint64_t last_use = 0;  ///< the engine's tick at the last acquire
  bool attached = true;        ///< still the group's current copy
  bool read = false;           ///< somebody acquired it

  // For Note [Why a wait was one].
  std::optional<Cause> held_back;  ///< what kept it from being issued before
  EventPtr behind;                 ///< the copy that was issued before it

  bool in_block_of_its_own() const noexcept { return place == Place::overflow || place == Place::beside; }

  bool evictable() const noexcept { return leases == 0 && state != State::issuing; }

  bool any_outdated() const noexcept {
    return std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.outdated; });
  }

  void add_reader(Stream stream) {
    if (std::find(readers.begin(), readers.end(), stream) == readers.end()) readers.push_back(stream);
  }

  void add_released(Stream stream, EventPtr event) {
    if (!event) return;
    for (auto& [known, latest] : released) {
      if (known == stream) {
        latest = std::move(event);
        return;
      }
    }
    released.emplace_back(stream, std::move(event));
  }

  bool has_waited(Stream stream) const noexcept {
    return std::find(waited.begin(), waited.end(), stream) != waited.end();
  }
};

}  // namespace dynswap
