// MemoryWatch counts the writes to memory, without being told of them.
#include "io/memory_watch.h"

#include <array>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "io/elements.h"
#include "watched_memory.h"

namespace dynswap::test {

TEST(memory_watch_sees_each_byte) {
  // Sizes that are hashed, that are watched, and whose ends share pages, at an address like malloc's.
  const bool watches = kernel_watches();
  for (const std::size_t bytes : {1, 7, 31, 33, 4096, 20000, 40000, 65537, 300000}) {
    const auto memory = pages(bytes / kPage + 3);
    std::byte* const data = memory.get() + 64;
    MemoryWatch watch(data, bytes);
    EXPECT_EQ(watch.exact(), watches || bytes <= (64u << 10));
    std::uint64_t count = watch.writes();
    std::memset(data, 2, bytes);  // sampled or not, this is seen
    EXPECT(seen_once(watch, count));
    for (const std::size_t at : {std::size_t{0}, bytes / 3, bytes / 2, bytes - 1}) {
      data[at] ^= std::byte{1};
      if (watch.exact()) EXPECT(seen_once(watch, count));
    }
    count = watch.writes();
    // A write to a neighbouring byte does not count.
    data[-1] = std::byte{9};
    data[bytes] = std::byte{9};
    EXPECT(watch.writes() == count);
  }
}

TEST(memory_watch_counts_what_was_expected_once) {
  if (!kernel_watches()) return;
  const auto memory = pages(64);
  MemoryWatch watch(memory.get(), 64 * kPage);
  std::uint64_t count = watch.writes();
  watch.expect_writes();
  memory.get()[12345] = std::byte{5};
  EXPECT(seen_once(watch, count));
  memory.get()[12345] = std::byte{6};  // it is watched again
  EXPECT(seen_once(watch, count));
}

TEST(memory_watch_over_memory_that_others_watch) {
  // The same pages, a part of them, and some that reach beyond. The first look hides nothing from the others.
  if (!kernel_watches()) return;
  const auto memory = pages(256);
  auto whole = std::make_unique<MemoryWatch>(memory.get(), 256 * kPage);
  auto same = std::make_unique<MemoryWatch>(memory.get(), 256 * kPage);
  MemoryWatch part(memory.get() + 100 * kPage, 50 * kPage);
  MemoryWatch across(memory.get() + 140 * kPage, 100 * kPage);
  std::uint64_t of_whole = whole->writes(), of_same = same->writes(), of_part = part.writes(),
                of_across = across.writes();
  memory.get()[145 * kPage] = std::byte{2};
  EXPECT(seen_once(part, of_part));
  EXPECT(seen_once(*whole, of_whole));
  EXPECT(seen_once(across, of_across));
  EXPECT(seen_once(*same, of_same));
  memory.get()[200 * kPage] = std::byte{2};
  EXPECT(part.writes() == of_part);
  EXPECT(seen_once(across, of_across));
  EXPECT(seen_once(*same, of_same));
  // The end of one watch is no write to what the others watch, and they go on.
  of_part = part.writes();
  of_across = across.writes();
  whole.reset();
  same.reset();
  EXPECT(part.writes() == of_part);
  EXPECT(across.writes() == of_across);
  memory.get()[120 * kPage] = std::byte{3};
  EXPECT(seen_once(part, of_part));
  EXPECT(across.writes() == of_across);
  memory.get()[145 * kPage] = std::byte{4};
  EXPECT(seen_once(part, of_part));
  EXPECT(seen_once(across, of_across));
  memory.get()[239 * kPage] = std::byte{5};
  EXPECT(seen_once(across, of_across));
}

TEST(memory_watch_of_memory_that_is_page_locked_later) {
  const bool watches = kernel_watches();
  for (const std::size_t bytes : {96, 12000, 40000, 300000}) {
    const auto memory = pages(bytes / kPage + 3);
    std::byte* const data = memory.get() + 64;
    MemoryWatch watch(data, bytes);
    if (!watches && !watch.exact()) continue;
    for (const bool again : {false, true}) {
      for (const std::size_t at : {std::size_t{0}, bytes / 2, bytes - 1}) {
        std::uint64_t count = watch.writes();
        data[at] ^= std::byte{1};
        if (!again) watch.note_pinned();
        EXPECT(seen_once(watch, count));
      }
    }
  }
}

TEST(memory_watch_and_threads_that_write) {
  // A look sees every write that was made before it.
  if (!kernel_watches()) return;
  const auto memory = pages(256);
  MemoryWatch one(memory.get(), 256 * kPage), other(memory.get() + 128 * kPage, 64 * kPage);
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      MemoryWatch& watch = t == 0 ? one : other;
      std::uint64_t count = watch.writes();
      for (int i = 0; i < 300; ++i) {
        memory.get()[(130 + i % 50) * kPage + t] ^= std::byte{1};  // each its own bytes
        const std::uint64_t now = watch.writes();
        EXPECT(now != count);
        count = now;
        MemoryWatch brief(memory.get() + 16 * t * kPage, 64 * kPage);
        if (i % 7 == 0) watch.expect_writes();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(memory_watch_does_not_count_writes_to_gaps) {
  for (const std::size_t elements : {8, 3000, 100000}) {  // hashed, watched or sampled
    const auto memory = pages(elements * 8 / kPage + 1);
    const auto every_other = [&](std::size_t first) {
      return Elements{memory.get() + 4 * first, elements * 8 - 4, 4, {{elements, 8}}};
    };
    MemoryWatch even(every_other(0), /*mapped=*/false), odd(every_other(1), /*mapped=*/false);
    std::uint64_t evens = even.writes(), odds = odd.writes();
    EXPECT(!may_overlap(every_other(0), every_other(1)));
    memory.get()[0] ^= std::byte{1};
    EXPECT(seen_once(even, evens));
    EXPECT_EQ(odd.writes(), odds);
    memory.get()[elements * 8 - 1] ^= std::byte{1};
    EXPECT_EQ(even.writes(), evens);
    if (odd.exact()) EXPECT(seen_once(odd, odds));
  }
}

TEST(elements_overlap_or_lie_between_one_another) {
  std::array<std::byte, 256> memory;
  const auto rows = [&](std::size_t from, std::size_t run) {
    return Elements{memory.data() + from, 9 * 16 + run, run, {{10, 16}}};
  };
  EXPECT(!may_overlap(rows(0, 8), rows(8, 8)));
  EXPECT(!may_overlap(rows(8, 8), rows(16, 8)));
  EXPECT(may_overlap(rows(0, 9), rows(8, 8)));
  EXPECT(may_overlap(rows(8, 9), rows(16, 8)));
  EXPECT(may_overlap(rows(0, 4), dense_elements(memory.data() + 2, 100)));
  EXPECT(!may_overlap(dense_elements(memory.data(), 10), dense_elements(memory.data() + 10, 10)));
  EXPECT(may_overlap(dense_elements(memory.data(), 11), dense_elements(memory.data() + 10, 10)));
}

}  // namespace dynswap::test
