// io: File.
#include "io/file.h"

#include <cstring>
#include <filesystem>
#include <memory>
#include <vector>

#include "check.h"
#include "core/align.h"
#include "core/check.h"
#include "expect_reads.h"
#include "io/aligned_buffer.h"
#include "random.h"
#include "system.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kPage = 4096;

TEST(file_reads_any_range_to_any_address) {
  const std::size_t size = (9u << 20) + 777;  // the end is in the middle of a block
  TempFile written(size);
  const auto file = File::open(written.path());
  EXPECT_EQ(file->size(), size);
  Random random(7);
  for (int i = 0; i < 60; ++i) {
    if (i % 2 == 0) evict(written.path());
    const std::size_t bytes = i % 3 == 0 ? random.between(1, 5u << 20) : random.between(1, 300u << 10);
    std::uint64_t offset = random.below(size - bytes + 1);
    if (i % 5 == 0) offset = size - bytes;  // to the very end
    if (i % 7 == 0) offset = align_down(offset, kPage);
    // As DeviceTraits::phase() asks for it; a little beside it; anywhere.
    const std::size_t phases[] = {offset % kPage, offset % 512, (offset + 8) % kPage, random.below(kPage)};
    expect_reads(*file, written, offset, bytes, phases[i % 4]);
  }
  file->read(size, nullptr, 0, "an empty weight at the end", Keep::yes, ReadMode::quick);
}

TEST(file_that_cannot_be_opened) {
  const std::string folder = std::filesystem::temp_directory_path().string();
  for (const std::string& path : {std::string("/nonexistent/model.safetensors"), folder}) {
    EXPECT_THROWS(File::open(path), SourceError);
    EXPECT(contains(message_of([&] { File::open(path); }), "'" + path + "': "));
  }
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
      evict(written.path());
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

}  // namespace
