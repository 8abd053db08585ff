#include "core/arena.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/protection.h"

namespace dynswap {

namespace {

constexpr std::uint64_t kFree = std::numeric_limits<std::uint64_t>::max();

}  // namespace

std::vector<EventPtr> overwrite_after(const DeviceCopy& copy) {
  std::vector<EventPtr> after;
  if (PROTECTED(write_after_read)) {
    for (const auto& [stream, event] : copy.released) after.push_back(event);
  }
  if (PROTECTED(copy_after_copy) && copy.copied) after.push_back(copy.copied);
  return after;
}

Arena::Arena(std::size_t bytes) : bytes_(bytes) {
  if (bytes > 0) regions_.push_back({0, bytes, nullptr, {}});
}

std::optional<Arena::Window> Arena::best_window(std::size_t wanted, const Rank& rank) const {
  std::vector<std::optional<std::uint64_t>> ranks;
  ranks.reserve(regions_.size());
  for (const Region& region : regions_) {
    ranks.push_back(region.occupant ? rank(*region.occupant) : std::optional(kFree));
  }

  std::optional<Window> best;
  for (std::size_t first = 0; first < regions_.size(); ++first) {
    Window window{first, first, kFree, 0};
    std::size_t bytes = 0;
    for (std::size_t i = first; i < regions_.size() && ranks[i]; ++i) {
      window.last = i;
      window.rank = std::min(window.rank, *ranks[i]);
      if (regions_[i].occupant) window.evicted_bytes += regions_[i].bytes;
      bytes += regions_[i].bytes;
      if (bytes >= wanted) {
        if (!best || window.better_than(*best)) best = window;
        break;
      }
    }
  }
  return best;
}

std::vector<Arena::Region> Arena::place(const std::shared_ptr<DeviceCopy>& copy, const Rank& rank) {
  const std::size_t wanted = copy->bytes;
  const std::optional<Window> best = best_window(wanted, rank);
  if (!best) return {};

  const std::size_t begin = regions_[best->first].offset;
  const std::size_t end = begin + wanted;
  std::vector<Region> displaced(regions_.begin() + static_cast<std::ptrdiff_t>(best->first),
                                regions_.begin() + static_cast<std::ptrdiff_t>(best->last) + 1);
  for (Region& region : displaced) {
    if (region.occupant) region.after = overwrite_after(*region.occupant);
  }
  std::vector<Region> replacement{{begin, wanted, copy, {}}};
  Region& tail = displaced.back();
  if (tail.offset + tail.bytes > end) {
    // What is left of the last occupant is free, but its readers still have to finish.
    replacement.push_back({end, tail.offset + tail.bytes - end, nullptr, tail.after});
    tail.bytes = end - tail.offset;
  }
  const auto at = regions_.erase(regions_.begin() + static_cast<std::ptrdiff_t>(best->first),
                                 regions_.begin() + static_cast<std::ptrdiff_t>(best->last) + 1);
  regions_.insert(at, replacement.begin(), replacement.end());
  return displaced;
}

std::size_t Arena::offset(const DeviceCopy& copy) const {
  for (const Region& region : regions_) {
    if (region.occupant.get() == &copy) return region.offset;
  }
  throw Error("the arena does not hold this copy");
}

void Arena::vacate(const DeviceCopy& copy, std::vector<EventPtr> after) {
  for (Region& region : regions_) {
    if (region.occupant.get() != &copy) continue;
    region.occupant.reset();
    region.after = std::move(after);
    return;
  }
}

}  // namespace dynswap
