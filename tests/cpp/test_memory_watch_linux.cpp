// MemoryWatch over memory that the kernel, other processes and truncated files change.
#include "io/memory_watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "check.h"
#include "io/elements.h"
#include "io/file.h"
#include "platform/mapped_memory.h"
#include "temp_file.h"
#include "watched_memory.h"

namespace dynswap::test {

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
  void* const shared = ::mmap(nullptr, 64 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  const std::shared_ptr<void> memory(shared, [](void* begin) { ::munmap(begin, 64 * kPage); });
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

}  // namespace dynswap::test
