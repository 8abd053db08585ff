// io: which pages of a mapping were written to, and read_piece.
#include "io/reader.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "io/file.h"
#include "io/private_pages.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kPage = 4096;
constexpr std::byte kUntouched{0xEE};

/// A file that is mapped as torch.load(mmap=True) and safetensors do it.
class PrivateMapping {
 public:
  explicit PrivateMapping(const TempFile& file) : bytes_(file.content().size()) {
    const int fd = ::open(file.path().c_str(), O_RDONLY);
    data_ = static_cast<std::byte*>(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0));
    ::close(fd);
  }
  ~PrivateMapping() { ::munmap(data_, bytes_); }
  PrivateMapping(const PrivateMapping&) = delete;
  PrivateMapping& operator=(const PrivateMapping&) = delete;

  std::byte* data() const { return data_; }
  /// What touches these pages crashes.
  void forbid(std::size_t begin, std::size_t end) { ::mprotect(data_ + begin, end - begin, PROT_NONE); }

 private:
  std::byte* data_;
  const std::size_t bytes_;
};

TEST(private_pages_are_those_that_were_written) {
  const TempFile written(64 * kPage);
  const PrivateMapping mapping(written);
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
  const PrivateMapping mapping(written);
  for (const std::size_t page : {1023, 1024, 2047, 2999}) mapping.data()[page * kPage] ^= std::byte{1};
  const std::vector<ByteRange> expected{
      {1023 * kPage, 1025 * kPage}, {2047 * kPage, 2048 * kPage}, {2999 * kPage, 3000 * kPage}};
  EXPECT(private_ranges(mapping.data(), pages * kPage) == expected);
}

// ---------------------------------------------------------------------------------------- read_piece

std::atomic<std::size_t> longest_run{0};
std::atomic<int> misaligned{0};

/// 32-bit elements to 16-bit ones: the upper half.
void upper_half(void* dst, Scalar, const void* src, Scalar, std::size_t count) {
  if (count > longest_run) longest_run = count;
  if (reinterpret_cast<std::uintptr_t>(src) % 4 != 0) ++misaligned;
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<std::byte*>(dst) + 2 * i, static_cast<const std::byte*>(src) + 4 * i + 2, 2);
  }
}

std::vector<std::byte> upper_halves(const std::byte* src, std::size_t count) {
  std::vector<std::byte> result(2 * count);
  for (std::size_t i = 0; i < count; ++i) std::memcpy(result.data() + 2 * i, src + 4 * i + 2, 2);
  return result;
}

Source source_of(Scalar stored, Scalar wanted, std::uint64_t count) {
  Source source;
  source.name = "w";
  source.stored = stored;
  source.wanted = wanted;
  source.count = count;
  return source;
}

Piece piece_of(Source source, std::uint64_t first, std::uint64_t count) {
  return {std::make_shared<const Source>(std::move(source)), first, count, nullptr};
}

TEST(reader_sees_what_was_written_through_a_private_mapping) {
  // Nobody is told: not the file, not a version counter.
  const std::size_t pages = 600;
  TempFile written(pages * kPage);
  const PrivateMapping mapping(written);
  for (const std::size_t page : {3, 200, 201, 599}) {
    for (std::size_t i = 0; i < 64; ++i) mapping.data()[page * kPage + 60 * i] ^= std::byte{0xFF};
  }
  std::vector<std::byte> expected(mapping.data(), mapping.data() + pages * kPage);
  written.evict();

  Source source = source_of(Scalar::f32, Scalar::f32, (pages * kPage - 8) / 4);
  source.file = File::open(written.path());
  source.offset = 8;
  source.address = mapping.data() + 8;
  std::vector<std::byte> dst(pages * kPage - 8);
  read_piece(piece_of(source, 0, source.count), dst.data(), nullptr, Pace::quick);
  EXPECT(std::memcmp(dst.data(), expected.data() + 8, dst.size()) == 0);

  source.wanted = Scalar::bf16;
  read_piece(piece_of(source, 1, source.count - 1), dst.data(), &upper_half, Pace::quick);
  const auto halves = upper_halves(expected.data() + 12, source.count - 1);
  EXPECT(std::memcmp(dst.data(), halves.data(), halves.size()) == 0);
}

TEST(reader_leaves_unwritten_pages_of_a_mapping_alone) {
  const TempFile written(64 * kPage);
  PrivateMapping mapping(written);
  mapping.data()[10 * kPage] ^= std::byte{1};
  std::vector<std::byte> expected(mapping.data(), mapping.data() + 64 * kPage);
  mapping.forbid(0, 10 * kPage);
  mapping.forbid(11 * kPage, 64 * kPage);
  Source source = source_of(Scalar::raw8, Scalar::raw8, 64 * kPage);
  source.file = File::open(written.path());
  source.address = mapping.data();
  std::vector<std::byte> dst(64 * kPage);
  read_piece(piece_of(source, 0, source.count), dst.data(), nullptr, Pace::quick);
  EXPECT(dst == expected);
}

TEST(reader_casts_in_runs) {
  longest_run = 0;
  misaligned = 0;
  const std::size_t count = 700000;
  TempFile written(count * 4 + 100);
  const auto file = File::open(written.path());
  for (const std::size_t offset : {0, 8, 64, 3}) {  // 3: no element of the file is aligned
    for (const bool from_file : {true, false}) {
      Source source = source_of(Scalar::f32, Scalar::bf16, count);
      if (from_file) {
        source.file = file;
        source.offset = offset;
      } else {
        source.address = written.at(offset);
      }
      if (from_file) written.evict();
      const std::size_t first = 12345;
      std::vector<std::byte> dst(2 * (count - first) + 1, kUntouched);
      read_piece(piece_of(source, first, count - first), dst.data(), &upper_half, Pace::quick);
      const auto expected = upper_halves(written.at(offset + 4 * first), count - first);
      EXPECT(std::memcmp(dst.data(), expected.data(), expected.size()) == 0);
      EXPECT(dst.back() == kUntouched);
    }
  }
  EXPECT_EQ(longest_run.load(), kCastRun);
  EXPECT_EQ(misaligned.load(), 0);
  EXPECT_THROWS(
      read_piece(piece_of(source_of(Scalar::f32, Scalar::bf16, 1), 0, 1), nullptr, nullptr, Pace::quick),
      Error);
}

}  // namespace
