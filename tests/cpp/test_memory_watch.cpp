// MemoryWatch counts the writes to memory, without being told of them.
#include "io/memory_watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "io/elements.h"
#include "io/file.h"
#include "io/mapped_memory.h"
#include "temp_file.h"

namespace dynswap::test {

namespace {

constexpr std::size_t kPage = 4096;

/// Pages of our own, filled with ones.
std::shared_ptr<std::byte> pages(std::size_t count, int flags = MAP_PRIVATE | MAP_ANONYMOUS) {
  void* const address = ::mmap(nullptr, count * kPage, PROT_READ | PROT_WRITE, flags, -1, 0);
  std::memset(address, 1, count * kPage);
  return {static_cast<std::byte*>(address), [count](std::byte* begin) { ::munmap(begin, count * kPage); }};
}

/// Whether this kernel watches pages. If not, the test is skipped with a message.
bool kernel_watches() {
  const auto memory = pages(16);
  const bool watches = PageWatch::over(pages_within(memory.get(), 16 * kPage), PageSelection::all) != nullptr;
  if (!watches) std::puts("    skipped: this kernel watches no pages (Linux 6.7 and userfaultfd are needed)");
  return watches;
}

/// Whether a first look finds a write and a second look does not count it again.
bool seen_once(MemoryWatch& watch, std::uint64_t& count) {
  const std::uint64_t now = watch.writes();
  return std::exchange(count, now) != now && watch.writes() == count;
}

}  // namespace

TEST(memory_watch_sees_each_byte) {
  // Sizes that are hashed, that are watched, and whose ends share pages, at an address like malloc's.
  const bool watches = kernel_watches();
  for (const std::size_t bytes : {1, 7, 31, 33, 4096, 20000, 40000, 65537, 300000}) {
    const auto memory = pages(bytes / kPage + 3);
    std::byte* const data = memory.get() + 64;
    MemoryWatch watch(data, bytes);
    if (!watches && !watch.exact()) continue;
    EXPECT(watch.exact());
    std::uint64_t count = watch.writes();
    for (const std::size_t at : {std::size_t{0}, bytes / 3, bytes / 2, bytes - 1}) {
      data[at] ^= std::byte{1};
      EXPECT(seen_once(watch, count));
    }
    // A write to a neighbouring byte does not count.
    data[-1] = std::byte{9};
    data[bytes] = std::byte{9};
    EXPECT(watch.writes() == count);
  }
}

TEST(memory_watch_sees_a_write_of_the_kernel) {
  if (!kernel_watches()) return;
  const auto memory = pages(64);
  MemoryWatch watch(memory.get(), 64 * kPage);
  std::uint64_t count = watch.writes();
  const int zero = ::open("/dev/zero", O_RDONLY | O_CLOEXEC);
  EXPECT(::read(zero, memory.get() + 7 * kPage, 10) == 10);
  ::close(zero);
  EXPECT(seen_once(watch, count));
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
  // The end of one watch may count as a write for the others, and no more.
  whole.reset();
  same.reset();
  of_part = part.writes();
  memory.get()[120 * kPage] = std::byte{3};
  EXPECT(seen_once(part, of_part));
}

TEST(memory_watch_of_memory_that_was_mapped_anew) {
  if (!kernel_watches()) return;
  const auto memory = pages(64);
  MemoryWatch watch(memory.get(), 64 * kPage);
  std::uint64_t count = watch.writes();
  void* const again = ::mmap(memory.get(), 64 * kPage, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  EXPECT(again == memory.get());
  EXPECT(seen_once(watch, count));
  EXPECT(watch.exact());  // the new memory is watched
  memory.get()[7 * kPage] = std::byte{3};
  EXPECT(seen_once(watch, count));
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

TEST(memory_watch_in_a_forked_child) {
  // What a child's watches do does not change the parent's, and the child can watch pages of its own.
  if (!kernel_watches()) return;
  const auto memory = pages(64);
  auto watch = std::make_unique<MemoryWatch>(memory.get(), 64 * kPage);
  std::uint64_t count = watch->writes();
  const pid_t child = ::fork();
  if (child == 0) {
    watch->writes();
    watch.reset();
    const auto own = pages(64);
    MemoryWatch of_own(own.get(), 64 * kPage);
    std::uint64_t own_count = of_own.writes();
    own.get()[5 * kPage] = std::byte{7};
    ::_exit(seen_once(of_own, own_count) && of_own.exact() ? 0 : 1);
  }
  int status = -1;
  EXPECT(::waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT(watch->exact());
  memory.get()[9 * kPage] = std::byte{3};
  EXPECT(seen_once(*watch, count));
}

TEST(memory_watch_of_memory_that_processes_share) {
  // The kernel does not tell of other processes' writes: the memory is sampled, and exact() is false.
  const auto memory = pages(64, MAP_SHARED | MAP_ANONYMOUS);
  MemoryWatch watch(memory.get(), 64 * kPage);
  EXPECT(!watch.exact());
  std::uint64_t count = watch.writes();
  const pid_t child = ::fork();
  if (child == 0) {
    std::memset(memory.get(), 3, 64 * kPage);
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT(seen_once(watch, count));
}

TEST(memory_watch_of_a_file_mapping) {
  const bool watches = kernel_watches();
  const TempFile written(256 * kPage);
  const auto file = File::open(written.path());
  const int descriptor = ::open(written.path().c_str(), O_RDWR | O_CLOEXEC);
  void* const mapped = ::mmap(nullptr, 256 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE, descriptor, 0);
  ::close(descriptor);
  auto* const data = static_cast<std::byte*>(mapped);
  // Three weights that share a page: the small one lies between the others.
  const auto source = [&](std::size_t begin, std::size_t bytes) {
    Source made;
    made.count = bytes;
    made.address = data + begin;
    made.file = file;
    made.offset = begin;
    return made;
  };
  MemoryWatch first(source(100, 100 * kPage)), small(source(100 * kPage + 100, 50)),
      last(source(100 * kPage + 150, 150 * kPage));
  std::uint64_t of_first = first.writes(), of_small = small.writes(), of_last = last.writes();
  EXPECT(first.exact() && small.exact() && last.exact());
  volatile std::byte sink = data[50 * kPage];
  static_cast<void>(sink);
  EXPECT(first.writes() == of_first);  // reading is no write
  // A write to one does not count for those that share its page.
  data[100 * kPage + 120] ^= std::byte{1};
  EXPECT(first.writes() == of_first);
  EXPECT(last.writes() == of_last);
  EXPECT(seen_once(small, of_small));
  data[100 * kPage + 140] ^= std::byte{1};
  EXPECT(seen_once(small, of_small));
  data[100 * kPage + 160] ^= std::byte{1};
  EXPECT(first.writes() == of_first);
  EXPECT(seen_once(last, of_last));
  EXPECT(small.writes() == of_small);
  // The first write is to a page as in the file, the later ones to a page that is private already.
  for (int i = 0; i < 3 && watches; ++i) {
    data[150 * kPage + 5] ^= std::byte{1};
    EXPECT(seen_once(last, of_last));
  }
  data[50 * kPage] ^= std::byte{1};
  EXPECT(seen_once(first, of_first));
  EXPECT_EQ(first.exact(), watches);
  ::munmap(mapped, 256 * kPage);
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

TEST(memory_watch_counts_memory_that_is_gone_as_written) {
  const TempFile file(4 * kPage);
  const int descriptor = ::open(file.path().c_str(), O_RDWR);
  void* const mapped = ::mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE, descriptor, 0);
  auto* const data = static_cast<std::byte*>(mapped);
  data[3 * kPage] = std::byte{1};  // private from now on
  MemoryWatch watch(dense_elements(data + 100, 4 * kPage - 100), /*mapped=*/true);
  MemoryWatch there(dense_elements(data + 100, 100), /*mapped=*/true);
  const std::uint64_t before = watch.writes(), kept = there.writes();
  EXPECT_EQ(watch.writes(), before);
  EXPECT_EQ(::ftruncate(descriptor, kPage), 0);
  EXPECT(watch.writes() != before);
  EXPECT_EQ(there.writes(), kept);
  std::byte byte{7};
  EXPECT(!read_mapped(data + 3 * kPage, &byte, 1));
  EXPECT(!write_mapped(data + 3 * kPage, &byte, 1));
  EXPECT(write_mapped(data, &byte, 1) && data[0] == byte);
  ::munmap(mapped, 4 * kPage);
  ::close(descriptor);
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
