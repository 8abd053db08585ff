// io: which pages of a mapping were written to.
#include <sys/mman.h>

#include <memory>
#include <vector>

#include "check.h"
#include "io/file.h"
#include "io/private_pages.h"
#include "io/reader.h"
#include "system.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kPage = 4096;

TEST(private_pages_are_those_that_were_written) {
  const TempFile written(64 * kPage);
  const PrivateMapping mapping(written.path());
  EXPECT(private_ranges(mapping.data(), 64 * kPage).empty());
  volatile std::byte sink = mapping.data()[5 * kPage];  // reading makes no page private
  static_cast<void>(sink);
  for (const std::size_t page : {0, 7, 8, 63}) mapping.data()[page * kPage + 17] ^= std::byte{1};
  const std::vector<ByteRange> whole{{0, kPage}, {7 * kPage, 9 * kPage}, {63 * kPage, 64 * kPage}};
  EXPECT(private_ranges(mapping.data(), 64 * kPage) == whole);
  // Clipped to what was asked for, and relative to it.
  const std::vector<ByteRange> part{{0, 100}, {6 * kPage + 100, 7 * kPage}};
  EXPECT(private_ranges(mapping.data() + kPage - 100, 7 * kPage) == part);
  EXPECT(private_ranges(mapping.data(), 0).empty());
}

TEST(private_pages_of_a_large_range) {
  // More than one look at the page map.
  const std::size_t pages = 3000;
  const TempFile written(pages * kPage);
  const PrivateMapping mapping(written.path());
  for (const std::size_t page : {1023, 1024, 2047, 2999}) mapping.data()[page * kPage] ^= std::byte{1};
  const std::vector<ByteRange> expected{
      {1023 * kPage, 1025 * kPage}, {2047 * kPage, 2048 * kPage}, {2999 * kPage, 3000 * kPage}};
  EXPECT(private_ranges(mapping.data(), pages * kPage) == expected);
}

TEST(reader_leaves_unwritten_pages_of_a_mapping_alone) {
  const TempFile written(64 * kPage);
  const PrivateMapping mapping(written.path());
  mapping.data()[10 * kPage] ^= std::byte{1};
  std::vector<std::byte> expected(mapping.data(), mapping.data() + 64 * kPage);
  // What touches these pages crashes.
  ::mprotect(mapping.data(), 10 * kPage, PROT_NONE);
  ::mprotect(mapping.data() + 11 * kPage, 53 * kPage, PROT_NONE);
  Source source;
  source.count = 64 * kPage;
  source.file = File::open(written.path());
  source.address = mapping.data();
  std::vector<std::byte> dst(64 * kPage);
  read_piece({std::make_shared<const Source>(source), 0, source.count, nullptr}, dst.data(), nullptr,
             ReadMode::quick);
  EXPECT(dst == expected);
}

}  // namespace
