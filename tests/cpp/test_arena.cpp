// The arena: where slots lie, and that what guards a byte is handed on to whoever overwrites it.
#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "check.h"
#include "core/arena.h"
#include "core/check.h"
#include "random.h"

namespace dynswap::test {

namespace {

class Pending final : public Event {
 public:
  bool done() const noexcept override { return false; }
};

std::shared_ptr<DeviceCopy> make_copy(std::size_t bytes, std::uint64_t last_use = 0) {
  auto copy = std::make_shared<DeviceCopy>();
  copy->bytes = bytes;
  copy->last_use = last_use;
  copy->state = DeviceCopy::State::issued;
  return copy;
}

/// Gives up what no lease holds, the longest unused first.
std::optional<std::uint64_t> oldest_first(const DeviceCopy& copy) {
  return copy.leases == 0 ? std::optional<std::uint64_t>(1000000 - copy.last_use) : std::nullopt;
}

void expect_covered(const Arena& arena) {
  std::size_t offset = 0;
  for (const Arena::Region& region : arena.regions()) {
    EXPECT_EQ(region.offset, offset);
    EXPECT(region.bytes > 0);
    offset += region.bytes;
  }
  EXPECT_EQ(offset, arena.bytes());
}

}  // namespace

TEST(arena_empty_has_no_room) {
  Arena arena;
  EXPECT(arena.place(make_copy(1), oldest_first).empty());
}

TEST(arena_fills_free_memory_first) {
  Arena arena(300);
  const auto first = make_copy(100);
  const auto second = make_copy(200);
  EXPECT_EQ(arena.place(first, oldest_first).size(), 1u);
  const auto displaced = arena.place(second, oldest_first);
  EXPECT_EQ(displaced.size(), 1u);
  EXPECT(displaced.front().occupant == nullptr);
  EXPECT_EQ(arena.offset(*first), 0u);
  EXPECT_EQ(arena.offset(*second), 100u);
  expect_covered(arena);
}

TEST(arena_gives_up_the_most_willing) {
  Arena arena(300);
  const auto old = make_copy(100, 1);
  const auto older = make_copy(100, 0);
  const auto young = make_copy(100, 2);
  for (const auto& copy : {old, older, young}) arena.place(copy, oldest_first);
  const auto fresh = make_copy(100, 3);
  const auto displaced = arena.place(fresh, oldest_first);
  EXPECT_EQ(displaced.size(), 1u);
  EXPECT(displaced.front().occupant == older);
  EXPECT_EQ(arena.offset(*fresh), 100u);
}

TEST(arena_never_takes_what_is_held) {
  Arena arena(300);
  const auto held = make_copy(100);
  arena.place(make_copy(100), oldest_first);
  arena.place(held, oldest_first);
  arena.place(make_copy(100), oldest_first);
  held->leases = 1;
  EXPECT(arena.place(make_copy(200), oldest_first).empty());  // there are 200 bytes, but not in one piece
  EXPECT_EQ(arena.place(make_copy(100), oldest_first).size(), 1u);
  EXPECT_EQ(arena.offset(*held), 100u);
  expect_covered(arena);
}

TEST(arena_a_large_group_displaces_several_small_ones) {
  Arena arena(400);
  std::vector<std::shared_ptr<DeviceCopy>> small;
  for (int i = 0; i < 4; ++i) {
    small.push_back(make_copy(100, static_cast<std::uint64_t>(i)));
    arena.place(small.back(), oldest_first);
  }
  const auto large = make_copy(250, 9);
  const auto displaced = arena.place(large, oldest_first);
  EXPECT_EQ(displaced.size(), 3u);
  EXPECT_EQ(displaced.back().bytes, 50u);  // clipped to the slot
  expect_covered(arena);
}

TEST(arena_what_is_left_of_an_occupant_stays_guarded) {
  Arena arena(100);
  const auto first = make_copy(100);
  arena.place(first, oldest_first);
  const EventPtr read = std::make_shared<Pending>();
  first->add_released(0, read);
  const auto second = make_copy(60);
  const auto displaced = arena.place(second, oldest_first);
  EXPECT_EQ(displaced.size(), 1u);
  EXPECT(displaced.front().after == std::vector<EventPtr>{read});
  const auto third = make_copy(40);
  const auto rest = arena.place(third, [](const DeviceCopy&) { return std::nullopt; });
  EXPECT_EQ(rest.size(), 1u);
  EXPECT(rest.front().after == std::vector<EventPtr>{read});
}

TEST(arena_copy_that_it_does_not_hold) {
  Arena arena(100);
  const auto stranger = make_copy(10);
  EXPECT_THROWS(arena.offset(*stranger), Error);
  arena.vacate(*stranger, {});  // no effect
  expect_covered(arena);
}

// The property behind Invariant 1: whoever overwrites a byte is told every event that guards it.
TEST(arena_every_byte_hands_its_guards_on) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Random random(seed);
    const std::size_t bytes = random.between(20, 200);
    Arena arena(bytes);
    std::vector<std::set<const Event*>> guards(bytes);  // a byte each
    std::vector<std::shared_ptr<DeviceCopy>> copies;
    for (int step = 0; step < 60; ++step) {
      if (!copies.empty() && random.chance(0.3)) {
        // Somebody lets go, or the master has changed.
        const std::size_t i = random.below(copies.size());
        const std::shared_ptr<DeviceCopy> copy = copies[i];
        copy->leases = 0;
        if (random.chance(0.5)) {
          arena.vacate(*copy, overwrite_after(*copy));
          copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
        }
        continue;
      }
      const auto copy = make_copy(random.between(1, bytes / 2), static_cast<std::uint64_t>(step));
      const auto displaced = arena.place(copy, oldest_first);
      expect_covered(arena);
      if (displaced.empty()) continue;
      const std::size_t offset = arena.offset(*copy);
      std::size_t at = offset;
      for (const Arena::Region& region : displaced) {
        EXPECT_EQ(region.offset, at);
        std::set<const Event*> told;
        for (const EventPtr& event : region.after) told.insert(event.get());
        for (; at < region.offset + region.bytes; ++at) {
          EXPECT(std::includes(told.begin(), told.end(), guards[at].begin(), guards[at].end()));
        }
        if (region.occupant) {
          EXPECT_EQ(region.occupant->leases, 0u);
          copies.erase(std::find(copies.begin(), copies.end(), region.occupant));
        }
      }
      EXPECT_EQ(at, offset + copy->bytes);
      // It is being copied, then read on some streams, and held now and then.
      copy->copied = std::make_shared<Pending>();
      for (Stream stream = 0; stream < random.below(3); ++stream) {
        copy->add_released(stream, std::make_shared<Pending>());
      }
      copy->leases = random.chance(0.3) ? 1 : 0;
      std::set<const Event*> guard{copy->copied.get()};
      for (const auto& [stream, event] : copy->released) guard.insert(event.get());
      std::fill_n(guards.begin() + static_cast<std::ptrdiff_t>(offset), copy->bytes, guard);
      copies.push_back(copy);
    }
  }
}

}  // namespace dynswap::test
