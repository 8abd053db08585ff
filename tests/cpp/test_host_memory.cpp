// core: the account of the host's RAM.
#include "core/host_memory.h"

#include <memory>

#include "check.h"

namespace {

using namespace dynswap;

std::size_t used(HostUse use) { return HostMemory::used()[static_cast<std::size_t>(use)]; }

TEST(host_memory_gives_back_what_is_not_used_any_more) {
  const auto limit = HostMemory::limit({.copies = 100});
  auto first = HostMemory::charge(HostUse::copies, 60);
  EXPECT(first != nullptr);
  EXPECT(HostMemory::charge(HostUse::copies, 41) == nullptr);
  EXPECT_EQ(used(HostUse::copies), 60u);
  first.reset();
  EXPECT_EQ(used(HostUse::copies), 0u);
  EXPECT(HostMemory::charge(HostUse::copies, 100) != nullptr);
}

TEST(host_memory_holds_the_limits_of_all_sessions) {
  auto tight = HostMemory::limit({.beside_masters = 100});
  const auto loose = HostMemory::limit({.copies = 1000});
  EXPECT(HostMemory::named());
  const auto staging = std::make_shared<HostMemory::Charge>(HostUse::staging);
  staging->must_grow(90);  // no copy works without
  EXPECT(HostMemory::charge(HostUse::copies, 11) == nullptr);
  EXPECT(HostMemory::charge(HostUse::page_cache, 10) != nullptr);
  EXPECT(HostMemory::charge(HostUse::locked, 5000) != nullptr);  // the masters' own memory
  staging->must_grow(90);
  EXPECT(HostMemory::charge(HostUse::copies, 0) == nullptr);
  tight.reset();
  EXPECT(!HostMemory::named());
  EXPECT(HostMemory::charge(HostUse::copies, 1000) != nullptr);
  EXPECT(HostMemory::charge(HostUse::copies, 1001) == nullptr);
}

TEST(host_memory_leaves_room_for_staging) {
  const auto limit = HostMemory::limit({.beside_masters = 100, .staging = 64});
  EXPECT(HostMemory::charge(HostUse::page_cache, 37) == nullptr);
  const auto cached = HostMemory::charge(HostUse::page_cache, 36);
  EXPECT(cached != nullptr);
  HostMemory::Charge staging(HostUse::staging);
  staging.must_grow(64);
  EXPECT_EQ(used(HostUse::staging) + used(HostUse::page_cache), 100u);
}

TEST(host_memory_counts_copies_as_page_locked) {
  const auto limit = HostMemory::limit({.locked = 100});
  const auto in_place = HostMemory::charge(HostUse::locked, 70);
  EXPECT(HostMemory::charge(HostUse::copies, 31) == nullptr);
  EXPECT(HostMemory::charge(HostUse::copies, 30) != nullptr);
}

TEST(host_memory_limits_what_comes_beyond_what_there_is) {
  const auto before = HostMemory::charge(HostUse::page_cache, 50);
  const auto limit = HostMemory::limit({.page_cache = 10});
  EXPECT(HostMemory::charge(HostUse::page_cache, 11) == nullptr);
  EXPECT(HostMemory::charge(HostUse::page_cache, 10) != nullptr);
}

TEST(host_memory_has_room_for_copies_that_a_later_session_found_memory_for) {
  const auto earlier = HostMemory::limit({.copies = 100});
  const auto copies = HostMemory::charge(HostUse::copies, 100);
  EXPECT(HostMemory::charge(HostUse::copies, 1) == nullptr);
  const auto later = HostMemory::limit({.copies = 50});
  EXPECT(HostMemory::charge(HostUse::copies, 51) == nullptr);
  EXPECT(HostMemory::charge(HostUse::copies, 50) != nullptr);
  const auto takes_none = HostMemory::limit({.copies = 0});
  EXPECT(HostMemory::charge(HostUse::copies, 50) != nullptr);
  const auto named = HostMemory::limit({.beside_masters = 190});
  EXPECT(HostMemory::charge(HostUse::copies, 91) == nullptr);
  EXPECT(HostMemory::charge(HostUse::copies, 90) != nullptr);
}

}  // namespace
