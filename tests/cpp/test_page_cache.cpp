// io: what enters the page cache.
#include "io/page_cache.h"

#include <chrono>

#include "check.h"

namespace {

using namespace dynswap;

constexpr std::uint64_t kMiB = 1u << 20;

TEST(admission_is_for_what_is_read_again) {
  Admission admission(64 * kMiB);
  for (std::uint64_t offset = 0; offset < 64 * kMiB; offset += 64u << 10)
    EXPECT(!admission.admit(offset, 64u << 10));
  EXPECT(admission.admit(0, 64u << 10));
  EXPECT(admission.admit(64 * kMiB - 1, 64u << 10));
  Admission tiny(1);
  EXPECT(!tiny.admit(0, 64u << 10));
  EXPECT(tiny.admit(0, 64u << 10));
}

TEST(admission_ends_where_it_never_pays_back) {
  using std::chrono::milliseconds;
  for (const int slowness : {2, 10}) {
    Admission admission(64 * kMiB);
    EXPECT(!admission.admit(0, 64u << 10));
    admission.took(/*through_cache=*/false, 64 * kMiB, milliseconds(100));
    EXPECT(admission.admit(0, 64u << 10));  // nothing is known of the other way yet
    admission.took(/*through_cache=*/true, 64 * kMiB, milliseconds(100) * slowness);
    EXPECT_EQ(admission.admit(0, 64u << 10), slowness == 2);
  }
}

TEST(admission_stays_within_the_limit_of_the_process) {
  constexpr std::size_t kRange = 4 * kMiB;
  const auto cached = [] { return HostMemory::used()[static_cast<std::size_t>(HostUse::page_cache)]; };
  const auto limit = HostMemory::limit({.beside_masters = 2 * kRange});
  {
    Admission first(64 * kMiB), second(64 * kMiB);
    for (const std::uint64_t offset : {0 * kRange, 1 * kRange}) {
      EXPECT(!first.admit(offset, kRange) && !second.admit(offset, kRange));
    }
    EXPECT(first.admit(0, kRange));
    EXPECT(second.admit(0, kRange));
    EXPECT(!first.admit(kRange, kRange));  // the other file's bytes count
    EXPECT(first.admit(0, kRange));        // once more, if the system took it back: it is counted once
    EXPECT_EQ(cached(), 2 * kRange);
  }
  EXPECT_EQ(cached(), 0u);
  Admission third(64 * kMiB);
  const auto smaller = HostMemory::limit({.page_cache = kRange});
  EXPECT(!third.admit(0, kRange) && !third.admit(kRange, kRange));
  EXPECT(third.admit(0, kRange));
  EXPECT(!third.admit(kRange, kRange));
}

TEST(admission_counts_each_block_once_in_whatever_ranges_it_is_read) {
  constexpr std::size_t kBlock = 64u << 10;
  const auto cached = [] { return HostMemory::used()[static_cast<std::size_t>(HostUse::page_cache)]; };
  Admission admission(16 * kBlock + 100);
  EXPECT(admission.charge(0, kBlock));
  EXPECT(admission.charge(0, 4 * kBlock));  // begins where the other did
  EXPECT_EQ(cached(), 4 * kBlock);
  EXPECT(admission.charge(3 * kBlock + 1, kBlock));
  EXPECT_EQ(cached(), 5 * kBlock);
  EXPECT(admission.charge(0, 16 * kBlock + 100));
  EXPECT_EQ(cached(), 16 * kBlock + 100);
}

}  // namespace
