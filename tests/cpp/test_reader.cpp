// io: how pieces are read.
#include "io/reader.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "io/aligned_buffer.h"
#include "io/file.h"
#include "lossless_weights.h"
#include "random.h"
#include "system.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kPage = 4096;
constexpr std::byte kUntouched{0xEE};

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
  const PrivateMapping mapping(written.path());
  for (const std::size_t page : {3, 200, 201, 599}) {
    for (std::size_t i = 0; i < 64; ++i) mapping.data()[page * kPage + 60 * i] ^= std::byte{0xFF};
  }
  std::vector<std::byte> expected(mapping.data(), mapping.data() + pages * kPage);
  evict(written.path());

  Source source = source_of(Scalar::f32, Scalar::f32, (pages * kPage - 8) / 4);
  source.file = File::open(written.path());
  source.offset = 8;
  source.address = mapping.data() + 8;
  std::vector<std::byte> dst(pages * kPage - 8);
  read_piece(piece_of(source, 0, source.count), dst.data(), nullptr, ReadMode::quick);
  EXPECT(std::memcmp(dst.data(), expected.data() + 8, dst.size()) == 0);

  source.wanted = Scalar::bf16;
  read_piece(piece_of(source, 1, source.count - 1), dst.data(), &upper_half, ReadMode::quick);
  const auto halves = upper_halves(expected.data() + 12, source.count - 1);
  EXPECT(std::memcmp(dst.data(), halves.data(), halves.size()) == 0);
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
      if (from_file) evict(written.path());
      const std::size_t first = 12345;
      std::vector<std::byte> dst(2 * (count - first) + 1, kUntouched);
      read_piece(piece_of(source, first, count - first), dst.data(), &upper_half, ReadMode::quick);
      const auto expected = upper_halves(written.at(offset + 4 * first), count - first);
      EXPECT(std::memcmp(dst.data(), expected.data(), expected.size()) == 0);
      EXPECT(dst.back() == kUntouched);
    }
  }
  EXPECT_EQ(longest_run.load(), kCastRun);
  EXPECT_EQ(misaligned.load(), 0);
  EXPECT_THROWS(
      read_piece(piece_of(source_of(Scalar::f32, Scalar::bf16, 1), 0, 1), nullptr, nullptr, ReadMode::quick),
      Error);
}

// --------------------------------------------------------------------------------------- read_pieces

/// What a group's weights are read into, and how.
struct Neighbours {
  struct Weight {
    std::uint64_t offset = 0;  ///< in the file, in bytes
    std::uint64_t count = 0;   ///< elements of four bytes
    std::size_t place = 0;     ///< where it is read to
    bool cast = false;
    const std::byte* address = nullptr;  ///< of its mapping, or instead of a file
    bool in_ram = false;
    Keep keep = Keep::yes;
  };

  explicit Neighbours(const TempFile& file) : written(file), opened(File::open(file.path())) {}

  void add(const Weight& weight) {
    Source source = source_of(Scalar::f32, weight.cast ? Scalar::bf16 : Scalar::f32, weight.count);
    source.name = "w" + std::to_string(pieces.size());
    if (!weight.in_ram) source.file = opened;
    source.offset = weight.in_ram ? 0 : weight.offset;
    source.address = weight.address;
    source.keep = weight.keep;
    weights.push_back(weight);
    pieces.push_back(piece_of(std::move(source), 0, weight.count));
  }

  /// Reads all of them; returns how often the file was asked. The expected bytes are in `truth`, which is
  /// what the file holds unless something was written to a mapping of it.
  std::uint64_t read(const std::byte* truth) {
    std::vector<std::byte> expected(kBytes, kUntouched);
    std::vector<PieceRead> reads;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const Weight& weight = weights[i];
      const std::byte* const stored = weight.in_ram ? weight.address : truth + weight.offset;
      const std::vector<std::byte> bytes = weight.cast
                                               ? upper_halves(stored, weight.count)
                                               : std::vector<std::byte>(stored, stored + 4 * weight.count);
      std::copy(bytes.begin(), bytes.end(), expected.begin() + static_cast<std::ptrdiff_t>(weight.place));
      reads.push_back({&pieces[i], dst.data() + weight.place});
    }
    std::fill_n(dst.data(), kBytes, kUntouched);
    const std::uint64_t before = requests();
    const std::uint64_t counting = requests() - before;
    const std::uint64_t begin = requests();
    read_pieces(reads, &upper_half, ReadMode::quick);
    const std::uint64_t end = requests();
    EXPECT(std::memcmp(dst.data(), expected.data(), kBytes) == 0);
    return end - begin - counting;
  }

  static constexpr std::size_t kBytes = 4u << 20;
  const TempFile& written;
  std::shared_ptr<const File> opened;
  std::vector<Weight> weights;
  std::vector<Piece> pieces;
  AlignedBuffer dst{kBytes};
};

/// Layers of a weight of 16 KiB and a bias of 256 bytes, one after the other.
void add_layers(Neighbours& group, std::size_t layers, std::size_t between, bool cast) {
  std::size_t offset = 128, place = 0;
  for (std::size_t i = 0; i < layers; ++i) {
    for (const std::size_t count : {4096, 64}) {
      group.add({.offset = offset, .count = count, .place = place, .cast = cast});
      offset += 4 * count + between;
      place += (cast ? 2 : 4) * count + 64 * (between > 0);
    }
  }
}

TEST(reader_decodes_and_casts_in_runs) {
  constexpr std::size_t kCount = 100000;
  const Bytes weights = trained(Scalar::f32, kCount, 7);
  const Bytes coded = encoded_tensor(Scalar::f32, weights);
  const TempFile written(coded.size());
  std::ofstream(written.path(), std::ios::binary)
      .write(reinterpret_cast<const char*>(coded.data()), static_cast<std::streamsize>(coded.size()));
  auto coding = std::make_shared<Coding>();
  coding->block_weights = lossless::kBlockWeights;
  coding->weights = kCount;
  for (std::size_t i = 0; i <= lossless::blocks_of(kCount); ++i)
    coding->blocks.push_back(get(coded, 8 * i, 8));
  for (const Scalar wanted : {Scalar::f32, Scalar::bf16}) {
    for (const bool from_file : {true, false}) {
      Source source = source_of(Scalar::f32, wanted, kCount);
      source.coding = coding;
      if (from_file) {
        source.file = File::open(written.path());
      } else {
        source.address = coded.data();
      }
      const std::size_t size = scalar_size(wanted);
      for (const std::size_t first : {0, 5000}) {
        for (const std::size_t count : {std::size_t{1}, std::size_t{kCastRun} + 1, kCount - first}) {
          longest_run = 0;
          std::vector<std::byte> dst(count * size + 1, kUntouched);
          read_piece(piece_of(source, first, count), dst.data(), &upper_half, ReadMode::quick);
          const std::byte* const src = weights.data() + 4 * first;
          const Bytes expected =
              wanted == Scalar::f32 ? Bytes(src, src + 4 * count) : upper_halves(src, count);
          EXPECT(std::memcmp(dst.data(), expected.data(), expected.size()) == 0);
          EXPECT(dst.back() == kUntouched);
          if (wanted == Scalar::f32) continue;
          EXPECT(longest_run <= kCastRun);
          EXPECT(longest_run >= std::min<std::size_t>(count, kCastRun - lossless::kBlockWeights));
        }
      }
    }
  }
}

TEST(neighbours_are_read_in_one_request) {
  TempFile written(4u << 20);
  evict(written.path());
  for (const bool cast : {false, true}) {
    for (const std::size_t between : {0, 64, 4096}) {
      Neighbours group(written);
      add_layers(group, 20, between, cast);
      for (int pass = 0; pass < 3; ++pass) {
        const std::uint64_t asked = group.read(written.at(0));
        if (requests() > 0) EXPECT_EQ(asked, 1);
      }
    }
  }
  // What lies far apart is not read for nothing.
  Neighbours apart(written);
  add_layers(apart, 4, 100'000, /*cast=*/false);
  const std::uint64_t asked = apart.read(written.at(0));
  if (requests() > 0) EXPECT_EQ(asked, 8);
}

TEST(neighbours_in_any_order_and_of_many_kinds) {
  const TempFile written(4u << 20);
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    Neighbours group(written);
    const PrivateMapping mapping(written.path());
    std::vector<std::byte> truth(mapping.data(), mapping.data() + written.content().size());
    const bool mapped = random.next() % 2 == 0;
    std::vector<Neighbours::Weight> weights;
    std::size_t offset = 4 * (random.next() % 64), place = 0;
    for (int i = 0; i < 40; ++i) {
      Neighbours::Weight weight{.offset = offset, .count = 1 + random.next() % 9000, .place = place};
      if (random.next() % 8 == 0) weight.count *= 10;
      weight.cast = random.next() % 4 == 0;
      weight.in_ram = random.next() % 6 == 0;
      weight.keep = random.next() % 10 == 0 ? Keep::no : Keep::yes;
      if (weight.in_ram) {
        weight.address = written.at(random.next() % 1024);
      } else if (mapped) {
        weight.address = mapping.data() + offset;
        if (random.next() % 16 == 0) {
          mapping.data()[offset] ^= std::byte{0xFF};
          truth[offset] ^= std::byte{0xFF};
        }
      }
      offset += 4 * weight.count + (random.next() % 2) * 4 * (random.next() % 6000);
      place += 4 * weight.count + (random.next() % 4 == 0) * 4;
      if (offset > (3u << 20) || place > (3u << 20)) break;
      weights.push_back(weight);
    }
    std::shuffle(weights.begin(), weights.end(), std::minstd_rand(static_cast<unsigned>(seed)));
    for (const Neighbours::Weight& weight : weights) group.add(weight);
    group.read(truth.data());
  }
}

TEST(an_error_among_neighbours_names_the_weight) {
  TempFile written(1u << 20);
  Neighbours group(written);
  add_layers(group, 3, 0, /*cast=*/false);
  group.add({.offset = (1u << 20) - 512, .count = 1000, .place = 3u << 20});
  std::vector<std::byte> longer(written.at(0), written.at(0) + (1u << 20));
  longer.resize(2u << 20);
  const std::string beyond = message_of([&] { group.read(longer.data()); });
  EXPECT(contains(beyond, "'w6'") && contains(beyond, "truncated"));
  Neighbours changed(written);
  add_layers(changed, 3, 0, /*cast=*/false);
  written.touch();
  EXPECT(contains(message_of([&] { changed.read(written.at(0)); }), "changed since it was loaded"));
}

}  // namespace
