// io: File, and forks during its transfers.
#include "io/file.h"

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "io/aligned_buffer.h"
#include "io/fork_gate.h"
#include "random.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kPage = 4096;
constexpr std::byte kUntouched{0xEE};

/// Reads a range to an address that is `phase` past a page, and looks at the bytes there and around them.
void expect_reads(const File& file, const TempFile& written, std::uint64_t offset, std::size_t bytes,
                  std::size_t phase, Keep keep = Keep::yes, ReadMode mode = ReadMode::quick) {
  const AlignedBuffer buffer(bytes + 2 * kPage);
  std::byte* const dst = buffer.data() + phase;
  std::memset(buffer.data(), static_cast<int>(kUntouched), bytes + 2 * kPage);
  file.read(offset, dst, bytes, "w", keep, mode);
  EXPECT(std::memcmp(dst, written.at(offset), bytes) == 0);
  for (std::size_t i = 0; i < phase; ++i)
    EXPECT_EQ(static_cast<int>(buffer.data()[i]), static_cast<int>(kUntouched));
  for (std::size_t i = 0; i < kPage; ++i)
    EXPECT_EQ(static_cast<int>(dst[bytes + i]), static_cast<int>(kUntouched));
}

TEST(file_reads_any_range_to_any_address) {
  const std::size_t size = (9u << 20) + 777;  // the end is in the middle of a block
  TempFile written(size);
  const auto file = File::open(written.path());
  EXPECT_EQ(file->size(), size);
  Random random(7);
  for (int i = 0; i < 60; ++i) {
    if (i % 2 == 0) written.evict();
    const std::size_t bytes = i % 3 == 0 ? random.between(1, 5u << 20) : random.between(1, 300u << 10);
    std::uint64_t offset = random.below(size - bytes + 1);
    if (i % 5 == 0) offset = size - bytes;  // to the very end
    if (i % 7 == 0) offset = align_down(offset, kPage);
    // As the backend's phase() asks for it; a little beside it; anywhere.
    const std::size_t phases[] = {offset % kPage, offset % 512, (offset + 8) % kPage, random.below(kPage)};
    expect_reads(*file, written, offset, bytes, phases[i % 4]);
  }
  file->read(size, nullptr, 0, "an empty weight at the end", Keep::yes, ReadMode::quick);
}

TEST(file_reads_what_is_large_and_cold_past_the_page_cache) {
  const std::size_t size = 8u << 20;
  TempFile written(size);
  const auto file = File::open(written.path());
  written.evict();
  if (written.cached_pages(0, size) > 0) return;  // tmpfs: it is the page cache
  expect_reads(*file, written, 0, size, 0);
  EXPECT_EQ(written.cached_pages(0, size), 0);
  // What is small is better cached: it is there at the next pass.
  expect_reads(*file, written, 3 * kPage + 5, 100, 0);
  EXPECT(written.cached_pages(3 * kPage, kPage) == 1);
}

TEST(file_enters_the_page_cache_when_it_is_read_again) {
  // See Note [What enters the page cache]
  const std::size_t size = (8u << 20) + 5;
  TempFile written(size);
  const auto file = File::open(written.path());
  written.evict();
  if (written.cached_pages(0, size) > 0) return;
  const std::size_t half = 4u << 20;
  expect_reads(*file, written, 0, half, 0);
  EXPECT_EQ(written.cached_pages(0, size), 0);
  expect_reads(*file, written, half, size - half, 0);
  EXPECT_EQ(written.cached_pages(0, half), 0);
  expect_reads(*file, written, 0, half, 0);
  EXPECT_EQ(written.cached_pages(0, half), half / kPage);
  const std::uint64_t before = bytes_from_disks();
  expect_reads(*file, written, 0, half, 0);
  EXPECT_EQ(bytes_from_disks(), before);
}

TEST(file_reads_cheaply_what_nobody_waits_for) {
  // See Note [Quick or cheap]
  const std::size_t size = 4u << 20;
  TempFile written(size);
  const auto file = File::open(written.path());
  written.evict();
  if (written.cached_pages(0, size) > 0) return;
  for (int pass = 0; pass < 3; ++pass) expect_reads(*file, written, 0, size, 0, Keep::yes, ReadMode::cheap);
  EXPECT_EQ(written.cached_pages(0, size), 0);
  for (int pass = 0; pass < 2; ++pass)
    expect_reads(*file, written, 0, size, 0, Keep::always, ReadMode::cheap);
  EXPECT_EQ(written.cached_pages(0, size), size / kPage);
  const std::uint64_t before = bytes_from_disks();
  expect_reads(*file, written, 0, size, 0, Keep::always, ReadMode::cheap);
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
    written.evict();
    const std::size_t cached = written.cached_pages(0, size);  // all of it on tmpfs
    for (int pass = 0; pass < 3; ++pass) {
      expect_reads(*file, written, 0, size, 0, Keep::no);
      expect_reads(*file, written, 512, 1u << 20, 512, Keep::no);
      expect_reads(*file, written, 8, 2u << 20, 0, Keep::no);
      expect_reads(*file, written, 3 * kPage + 5, 100, 0, Keep::no);
    }
    EXPECT_EQ(written.cached_pages(0, size), cached);
  }
}

TEST(file_takes_from_the_page_cache_what_is_there) {
  const std::size_t size = 4u << 20;
  TempFile written(size);
  const auto file = File::open(written.path());
  EXPECT(written.cached_pages(0, size) == size / kPage);
  std::uint64_t before = bytes_from_disks();
  expect_reads(*file, written, 0, size, 0);
  EXPECT_EQ(bytes_from_disks(), before);
  written.evict();
  if (before == 0 || written.cached_pages(0, size) > 0) return;  // nobody counts, or tmpfs
  before = bytes_from_disks();
  expect_reads(*file, written, 0, size, 0);
  EXPECT_EQ(bytes_from_disks(), before + size);
}

TEST(file_on_tmpfs) {
  if (!std::filesystem::is_directory("/dev/shm")) return;
  const std::size_t size = (1u << 20) + 100;
  const TempFile written(size, 3, "/dev/shm");
  const auto file = File::open(written.path());
  expect_reads(*file, written, 0, size, 0);
  expect_reads(*file, written, 100, 500000, 100);
}

TEST(file_that_cannot_be_opened) {
  EXPECT_THROWS(File::open("/nonexistent/model.safetensors"), SourceError);
  EXPECT(contains(message_of([] { File::open("/nonexistent/model.safetensors"); }),
                  "'/nonexistent/model.safetensors': No such file"));
  EXPECT(contains(message_of([] { File::open("/proc"); }), "'/proc': it is not an ordinary file"));
}

TEST(file_too_short_for_a_weight) {
  const TempFile written(100000);
  const auto file = File::open(written.path());
  std::vector<std::byte> dst(200000);
  EXPECT_THROWS(file->read(50000, dst.data(), 50001, "layer.weight", Keep::yes, ReadMode::quick),
                SourceError);
  EXPECT(contains(
      message_of([&] { file->read(~std::uint64_t{0}, dst.data(), 2, "w", Keep::yes, ReadMode::quick); }),
      "beyond the end"));
  const std::string message =
      message_of([&] { file->read(100001, dst.data(), 0, "layer.weight", Keep::yes, ReadMode::quick); });
  EXPECT(contains(message, "'layer.weight'") && contains(message, written.path()));
  EXPECT(contains(message, "100000 bytes") && contains(message, "truncated"));
}

TEST(file_changed_after_load) {
  for (const std::size_t bytes : {std::size_t{1000}, (std::size_t{1} << 20) - 200}) {
    for (const char* how : {"truncated", "truncated by a scrap", "grown", "rewritten"}) {
      TempFile written(2u << 20);
      const auto file = File::open(written.path());
      const AlignedBuffer dst(bytes);
      file->read(1u << 20, dst.data(), bytes, "layer.weight", Keep::yes, ReadMode::quick);
      if (how[0] == 't')
        written.truncate(contains(how, "scrap") ? (1u << 20) + bytes - 100 : (1u << 20) + 500);
      written.evict();
      if (how[0] == 'g') written.truncate(3u << 20);
      if (how[0] == 'r') written.touch();
      for (int i = 0; i < 2; ++i) {
        EXPECT_THROWS(file->read(1u << 20, dst.data(), bytes, "layer.weight", Keep::yes, ReadMode::quick),
                      SourceError);
      }
      const std::string message = message_of(
          [&] { file->read(1u << 20, dst.data(), bytes, "layer.weight", Keep::yes, ReadMode::quick); });
      EXPECT(contains(message, "'layer.weight'") && contains(message, written.path()));
      EXPECT(
          contains(message, how[0] == 't' ? "truncated since it was loaded" : "changed since it was loaded"));
      EXPECT(contains(message, "load it again"));
      // Loaded again, what is there is right.
      File::open(written.path())->read(0, dst.data(), 500, "layer.weight", Keep::yes, ReadMode::quick);
      EXPECT(std::memcmp(dst.data(), written.at(0), 500) == 0);
    }
  }
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
