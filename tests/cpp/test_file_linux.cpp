// io: File and the page cache, and forks during its transfers.
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <thread>

#include "check.h"
#include "core/check.h"
#include "core/host_memory.h"
#include "expect_reads.h"
#include "io/file.h"
#include "io/fork_gate.h"
#include "system.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kPage = 4096;

TEST(file_reads_what_is_large_and_cold_past_the_page_cache) {
  const std::size_t size = 8u << 20;
  TempFile written(size);
  const auto file = File::open(written.path());
  evict(written.path());
  if (cached_pages(written.path(), 0, size) > 0) return;  // tmpfs: it is the page cache
  expect_reads(*file, written, 0, size, 0);
  EXPECT_EQ(cached_pages(written.path(), 0, size), 0);
  // What is small is better cached: it is there at the next pass.
  expect_reads(*file, written, 3 * kPage + 5, 100, 0);
  EXPECT(cached_pages(written.path(), 3 * kPage, kPage) == 1);
}

TEST(file_enters_the_page_cache_when_it_is_read_again) {
  // See Note [What enters the page cache]
  const std::size_t size = (8u << 20) + 5;
  TempFile written(size);
  const auto file = File::open(written.path());
  evict(written.path());
  if (cached_pages(written.path(), 0, size) > 0) return;
  const std::size_t half = 4u << 20;
  expect_reads(*file, written, 0, half, 0);
  EXPECT_EQ(cached_pages(written.path(), 0, size), 0);
  expect_reads(*file, written, half, size - half, 0);
  EXPECT_EQ(cached_pages(written.path(), 0, half), 0);
  expect_reads(*file, written, 0, half, 0);
  EXPECT_EQ(cached_pages(written.path(), 0, half), half / kPage);
  const std::uint64_t before = bytes_from_disks();
  expect_reads(*file, written, 0, half, 0);
  EXPECT_EQ(bytes_from_disks(), before);
}

TEST(file_reads_cheaply_what_nobody_waits_for) {
  // See Note [Quick or cheap]
  const std::size_t size = 4u << 20;
  TempFile written(size);
  const auto file = File::open(written.path());
  evict(written.path());
  if (cached_pages(written.path(), 0, size) > 0) return;
  for (int pass = 0; pass < 3; ++pass) expect_reads(*file, written, 0, size, 0, Keep::yes, ReadMode::cheap);
  EXPECT_EQ(cached_pages(written.path(), 0, size), 0);
  for (int pass = 0; pass < 2; ++pass) expect_reads(*file, written, 0, size, 0, Keep::yes, ReadMode::quick);
  EXPECT_EQ(cached_pages(written.path(), 0, size), size / kPage);
  const std::uint64_t before = bytes_from_disks();
  expect_reads(*file, written, 0, size, 0, Keep::yes, ReadMode::quick);
  EXPECT_EQ(bytes_from_disks(), before);
  expect_reads(*file, written, 0, size, 0, Keep::yes, ReadMode::cheap);
  EXPECT_EQ(bytes_from_disks(), before == 0 ? 0 : before + size);
}

TEST(file_keeps_the_page_cache_as_it_is_when_asked) {
  for (const char* folder : {"/tmp", "/dev/shm"}) {
    if (!std::filesystem::is_directory(folder)) continue;
    const std::size_t size = 4u << 20;
    TempFile written(size, 1, folder);
    const auto file = File::open(written.path());
    evict(written.path());
    const std::size_t cached = cached_pages(written.path(), 0, size);  // all of it on tmpfs
    for (int pass = 0; pass < 3; ++pass) {
      expect_reads(*file, written, 0, size, 0, Keep::no);
      expect_reads(*file, written, 512, 1u << 20, 512, Keep::no);
      expect_reads(*file, written, 8, 2u << 20, 0, Keep::no);
      expect_reads(*file, written, 3 * kPage + 5, 100, 0, Keep::no);
    }
    EXPECT_EQ(cached_pages(written.path(), 0, size), cached);
  }
}

TEST(file_takes_from_the_page_cache_what_is_there) {
  const std::size_t size = 4u << 20;
  TempFile written(size);
  const auto file = File::open(written.path());
  EXPECT(cached_pages(written.path(), 0, size) == size / kPage);
  std::uint64_t before = bytes_from_disks();
  expect_reads(*file, written, 0, size, 0);
  EXPECT_EQ(bytes_from_disks(), before);
  evict(written.path());
  if (before == 0 || cached_pages(written.path(), 0, size) > 0) return;  // nobody counts, or tmpfs
  before = bytes_from_disks();
  expect_reads(*file, written, 0, size, 0);
  EXPECT_EQ(bytes_from_disks(), before + size);
}

TEST(file_leaves_no_small_range_in_the_page_cache_where_there_is_no_room) {
  const std::size_t size = 4u << 20, small = 32u << 10;
  TempFile written(size);
  evict(written.path());
  if (cached_pages(written.path(), 0, size) > 0) return;  // tmpfs: it is the page cache
  const auto limit = HostMemory::limit({.beside_masters = 2 * (64u << 10)});
  const auto file = File::open(written.path());
  for (const std::uint64_t offset : {0u << 20, 1u << 20, 2u << 20, 3u << 20})
    expect_reads(*file, written, offset, small, 0);
  EXPECT_EQ(cached_pages(written.path(), 0, size), 2 * small / kPage);
}

TEST(file_on_tmpfs) {
  if (!std::filesystem::is_directory("/dev/shm")) return;
  const std::size_t size = (1u << 20) + 100;
  const TempFile written(size, 3, "/dev/shm");
  const auto file = File::open(written.path());
  expect_reads(*file, written, 0, size, 0);
  expect_reads(*file, written, 100, 500000, 100);
}

TEST(file_that_cannot_be_opened_says_why) {
  EXPECT(contains(message_of([] { File::open("/nonexistent/model.safetensors"); }),
                  "'/nonexistent/model.safetensors': No such file"));
  EXPECT(contains(message_of([] { File::open("/proc"); }), "'/proc': it is not an ordinary file"));
}

TEST(file_replaced_by_another_is_still_read) {
  // As a checkpoint is saved over the old one: a new file takes the name.
  TempFile first(1u << 20, 1);
  TempFile second(1u << 20, 2);
  const auto file = File::open(first.path());
  std::filesystem::rename(second.path(), first.path());
  expect_reads(*file, first, 0, 1u << 20, 0);
}

TEST(fork_waits_for_transfers) {
  std::promise<void> begun;
  std::atomic<bool> over{false};
  std::thread transfer([&] {
    const NoFork no_fork;
    begun.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    over = true;
  });
  begun.get_future().wait();
  const pid_t child = ::fork();
  if (child == 0) {
    const NoFork here_too;
    ::syscall(SYS_exit_group, over ? 0 : 1);  // nothing else: sanitizers report at exit() what a fork leaves
  }
  EXPECT(over.load());
  transfer.join();
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const NoFork and_afterwards;
}

}  // namespace
