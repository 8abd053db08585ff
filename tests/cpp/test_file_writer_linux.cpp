// io: ranges of a scratch file, and the threads that write to it.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "core/host_memory.h"
#include "forked_child.h"
#include "io/file_writer.h"
#include "io/scratch_file.h"
#include "system.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

std::string folder() { return std::filesystem::temp_directory_path().string(); }

class Later final : public Event {
 public:
  bool done() const noexcept override { return done_.load(std::memory_order_acquire); }
  void happen() { done_.store(true, std::memory_order_release); }

 private:
  std::atomic<bool> done_{false};
};

/// A copy of `content`, `phase` bytes past a multiple of 4096.
std::shared_ptr<std::byte> buffer(const std::vector<std::byte>& content, std::size_t phase) {
  const std::shared_ptr<std::byte> memory(new std::byte[content.size() + 8192],
                                          [](const std::byte* each) { delete[] each; });
  std::byte* const begin = memory.get() + (4096 - reinterpret_cast<std::uintptr_t>(memory.get()) % 4096);
  std::memcpy(begin + phase, content.data(), content.size());
  return {memory, begin + phase};
}

using Range = std::shared_ptr<const ScratchFile::Range>;

std::shared_ptr<PendingWrite> write(FileWriter& writer, const ScratchFile& file, const Range& range,
                                    const std::vector<std::byte>& content, std::size_t phase = 0,
                                    EventPtr after = nullptr) {
  return writer.write(file.file(), range->offset, buffer(content, phase), content.size(), std::move(after),
                      range);
}

void expect_content(const ScratchFile& file, const Range& range, const std::vector<std::byte>& content) {
  for (const ReadMode mode : {ReadMode::quick, ReadMode::cheap}) {
    std::vector<std::byte> found(content.size());
    file.file()->read(range->offset, found.data(), found.size(), "w", Keep::no, mode);
    EXPECT(found == content);
  }
}

TEST(file_writer_writes_what_is_read) {
  for (const Keep keep : {Keep::yes, Keep::no}) {
    const auto file = std::make_shared<ScratchFile>(folder(), keep);
    FileWriter writer;
    struct Written {
      Range range;
      std::vector<std::byte> content;
      std::shared_ptr<PendingWrite> write;
    };
    std::vector<Written> all;
    const auto add = [&](std::size_t bytes, std::size_t phase) {
      Written made{file->take(bytes), random_bytes(bytes, bytes + phase), nullptr};
      made.write = write(writer, *file, made.range, made.content, phase);
      all.push_back(std::move(made));
    };
    for (const std::size_t bytes :
         {1ul, 4095ul, 4096ul, 4097ul, 1ul << 20, (3ul << 20) + 5, (5ul << 20) - 1}) {
      for (const std::size_t phase : {0, 64, 512, 3}) add(bytes, phase);
    }
    const auto check = [&] {
      for (const Written& each : all) {
        EXPECT(each.write->wait());
        EXPECT(each.write->error() == nullptr);
        expect_content(*file, each.range, each.content);
      }
    };
    check();
    // Ranges are used again.
    std::erase_if(all, [](const Written& each) { return each.content.size() % 2 == 0; });
    for (const std::size_t bytes : {4096ul, 1ul << 20, 2ul << 20}) add(bytes, 0);
    check();
  }
}

TEST(file_writer_keeps_to_the_account_of_the_page_cache) {
  const auto limited = HostMemory::limit({.page_cache = 3u << 20});
  const auto cached = [] { return HostMemory::used()[static_cast<std::size_t>(HostUse::page_cache)]; };
  const auto file = std::make_shared<ScratchFile>(folder(), Keep::yes);
  Range first = file->take(2u << 20);
  EXPECT(first != nullptr);
  EXPECT_EQ(cached(), 2u << 20);
  EXPECT(file->take(2u << 20) == nullptr);
  EXPECT(file->take(1u << 20) != nullptr);
  first = nullptr;
  EXPECT(file->take(3u << 20) != nullptr);  // the two that went have become one
  EXPECT_EQ(cached(), 3u << 20);
  EXPECT(std::make_shared<ScratchFile>(folder(), Keep::no)->take(2u << 20) != nullptr);
  EXPECT_EQ(cached(), 3u << 20);
}

/// Whether what is written past the page cache stays out of it here (on tmpfs it does not).
bool has_direct_writes() {
  const int fd = ::open(folder().c_str(), O_TMPFILE | O_RDWR | O_DIRECT, 0600);
  if (fd < 0) return false;
  const std::vector<std::byte> content(1u << 20);
  const bool written = ::pwrite(fd, buffer(content, 0).get(), content.size(), 0) > 0;
  std::byte first{};
  const iovec target{&first, 1};
  const bool out = written && ::preadv2(fd, &target, 1, 1, RWF_NOWAIT) < 0;
  ::close(fd);
  return out;
}

TEST(file_writer_goes_past_the_page_cache) {
  if (!has_direct_writes()) {
    std::printf("  the file system of %s has no direct writes\n", folder().c_str());
    return;
  }
  const auto file = std::make_shared<ScratchFile>(folder(), Keep::no);
  FileWriter writer;
  for (const std::size_t phase : {0, 64}) {
    const std::vector<std::byte> content = random_bytes((8u << 20) + 5, 1);
    const Range range = file->take(content.size());
    EXPECT(write(writer, *file, range, content, phase)->wait());
    EXPECT(!file->file()->is_cached(range->offset, content.size()));
    expect_content(*file, range, content);
    EXPECT(!file->file()->is_cached(range->offset, content.size()));
  }
}

TEST(file_writer_waits_for_the_copy) {
  const auto file = std::make_shared<ScratchFile>(folder(), Keep::yes);
  FileWriter writer;
  const std::vector<std::byte> content = random_bytes(1u << 20, 7);
  const auto copy = buffer(std::vector<std::byte>(content.size()), 0);
  const auto copied = std::make_shared<Later>();
  const Range range = file->take(content.size());
  const auto written = writer.write(file->file(), range->offset, copy, content.size(), copied, range);
  EXPECT(!written->wait(std::chrono::seconds(0)));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT(!written->done());
  std::memcpy(copy.get(), content.data(), content.size());
  copied->happen();
  EXPECT(written->wait());
  expect_content(*file, range, content);
}

TEST(file_writer_does_not_wait_for_a_device_that_has_failed) {
  const auto file = std::make_shared<ScratchFile>(folder(), Keep::yes);
  FileWriter writer;
  const std::vector<std::byte> content = random_bytes(1u << 10, 7);
  const auto written = write(writer, *file, file->take(1u << 10), content, 0, std::make_shared<Later>());
  written->give_up();
  EXPECT(written->wait());
  EXPECT(written->error() != nullptr);
}

TEST(file_writer_tells_what_a_file_does_not_take) {
  ::signal(SIGXFSZ, SIG_IGN);
  for (const Keep keep : {Keep::yes, Keep::no}) {
    const auto file = std::make_shared<ScratchFile>(folder(), keep);
    FileWriter writer;
    const std::vector<std::byte> content = random_bytes(1u << 20, 1);
    const Range range = file->take(content.size());
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    const rlimit none{4096, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &none);
    const auto written = write(writer, *file, range, content);
    EXPECT(written->wait());
    const auto counted = HostMemory::used();
    EXPECT_THROWS(file->take(content.size()), SourceError);
    EXPECT(HostMemory::used() == counted);
    ::setrlimit(RLIMIT_FSIZE, &before);
    EXPECT(written->error() != nullptr);
    // The file may be used as before.
    EXPECT(write(writer, *file, range, content)->wait());
    expect_content(*file, range, content);
  }
}

TEST(file_writer_leaves_out_what_has_not_begun_when_it_ends) {
  const auto file = std::make_shared<ScratchFile>(folder(), Keep::yes);
  const std::vector<std::byte> content = random_bytes(1u << 10, 1);
  std::vector<std::shared_ptr<PendingWrite>> all;
  {
    FileWriter writer;
    const auto never = std::make_shared<Later>();
    for (int i = 0; i < 20; ++i) all.push_back(write(writer, *file, file->take(1u << 10), content, 0, never));
  }
  for (const auto& each : all) EXPECT(each->done() && each->error() != nullptr);
}

TEST(file_writer_in_a_forked_child_waits_for_nobody) {
  const auto file = std::make_shared<ScratchFile>(folder(), Keep::yes);
  FileWriter writer;
  const std::vector<std::byte> content = random_bytes(1u << 20, 1);
  const auto copied = std::make_shared<Later>();
  const Range range = file->take(content.size());
  const auto written = write(writer, *file, range, content, 0, copied);
  EXPECT(in_a_forked_child([&] { return !written->wait() && written->error() == nullptr; }));
  copied->happen();
  EXPECT(written->wait());
  expect_content(*file, range, content);
}

}  // namespace
