// Sources whose weights are coded, against their plain twins: ranges, slices, reads, and how they are cut.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "coded_source.h"
#include "core/check.h"
#include "host/chunks.h"
#include "io/reader.h"
#include "random.h"
#include "system.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kBlock = lossless::kBlockWeights;
constexpr std::byte kUntouched{0xEE};
constexpr std::size_t kGuard = 24;  ///< bytes around what is read
constexpr std::array kWanted{Scalar::f64, Scalar::f32, Scalar::f16, Scalar::bf16, Scalar::f8_e5m2};

/// Where a part of a source is read to, with bytes around it that have to stay.
struct Target {
  explicit Target(std::size_t bytes) : all(bytes + 2 * kGuard, kUntouched) {}
  std::byte* data() { return all.data() + kGuard; }
  bool has(const Bytes& bytes) const {
    const auto begin = all.begin() + kGuard, end = all.end() - kGuard;
    return std::equal(begin, end, bytes.begin(), bytes.end()) && around();
  }
  bool around() const {
    const auto untouched = [](std::byte byte) { return byte == kUntouched; };
    return std::all_of(all.begin(), all.begin() + kGuard, untouched) &&
           std::all_of(all.end() - kGuard, all.end(), untouched);
  }
  Bytes all;
};

struct Part {
  std::uint64_t first;
  std::uint64_t count;
};

/// A part that begins or ends at a block's border, or beside it, or anywhere.
Part random_part(Random& random, std::uint64_t count) {
  const auto place = [&]() -> std::uint64_t {
    std::uint64_t at = random.below(count + 1);
    if (random.chance(0.5)) at = at / kBlock * kBlock + random.below(3);
    if (random.chance(0.2)) at = at > 0 ? at - 1 : 0;
    return std::min<std::uint64_t>(at, count);
  };
  const std::uint64_t a = place(), b = place();
  return {std::min(a, b), std::max(a, b) - std::min(a, b)};
}

}  // namespace

TEST(coded_ranges_are_those_of_whole_blocks) {
  const CodedWeights weights = some_weights(Scalar::bf16, 3 * kBlock + 700, 1);
  const auto& blocks = weights.coding->blocks;
  for (const std::uint64_t begin : {0, 1, 4095, 4096, 4097, 8192, 12000}) {
    const SourcePtr source = slice(weights.source(Scalar::bf16), begin, weights.count() - begin);
    EXPECT_EQ(source->address, weights.coded.data());
    EXPECT_EQ(source->extent(), weights.coded.size());
    EXPECT_EQ(source->stored_bytes(), blocks.back() - blocks[begin / kBlock]);
    for (const std::uint64_t first : {0, 1, 95, 96, 4095, 4096}) {
      for (const std::uint64_t count : {0, 1, 2, 4095, 4096, 4097, 8193}) {
        if (first + count > source->count) continue;
        const StoredRange range = source->stored_range(first, count);
        if (count == 0) {
          EXPECT_EQ(range.bytes(), 0u);
          continue;
        }
        EXPECT_EQ(range.begin, blocks[(begin + first) / kBlock]);
        EXPECT_EQ(range.end, blocks[(begin + first + count - 1) / kBlock + 1]);
      }
    }
  }
}

TEST(coded_elements_within_are_as_many_whole_blocks_as_fit) {
  Random random(2);
  for (int round = 0; round < 150; ++round) {
    const CodedWeights weights =
        some_weights(kCodable[random.below(3)], random.between(1, 5 * kBlock), random.next());
    const Part part = random_part(random, weights.count());
    if (part.count == 0) continue;
    const SourcePtr source = slice(weights.source(weights.type), part.first, part.count);
    const std::uint64_t first = random.below(part.count);
    const std::uint64_t bytes = random.below(2 * source->stored_bytes() + 2);
    std::uint64_t most = 0;
    for (std::uint64_t count = 1; first + count <= part.count; ++count) {
      const bool ends = first + count == part.count || (part.first + first + count) % kBlock == 0;
      if (ends && source->stored_range(first, count).bytes() <= bytes) most = count;
    }
    EXPECT_EQ(source->elements_within(first, bytes), most);
    EXPECT_EQ(source->elements_within(first, source->stored_range(first, part.count - first).bytes()),
              part.count - first);
  }
}

TEST(coded_pieces_are_read_from_everywhere) {
  Random random(3);
  for (int round = 0; round < 100; ++round) {
    const std::size_t most = round % 10 == 0 ? 300 * kBlock : 6 * kBlock;  // more than a scratch block has
    const CodedWeights weights =
        some_weights(kCodable[random.below(3)], random.between(1, most), random.next());
    const std::uint64_t offset = random.chance(0.5) ? 16 * random.below(600) : random.below(9000);
    const TempFile file(offset + weights.coded.size() + random.below(100), random.next());
    write_at(file.path(), offset, weights.coded);
    const PrivateMapping mapping(file.path());
    for (const int where : {0, 1, 2, 3}) {
      const Scalar wanted = random.chance(0.4) ? weights.type : kWanted[random.below(kWanted.size())];
      auto whole = where < 2 ? weights.source(wanted) : weights.source(wanted, file, offset);
      if (where == 1) {
        whole->address = mapping.data() + offset;
        whole->mapped = true;
      }
      if (where == 3) whole->address = mapping.data() + offset;
      whole->keep = random.chance(0.5) ? Keep::yes : Keep::no;
      if (where > 1 && random.chance(0.3)) evict(file.path());
      const Part of = random_part(random, weights.count());
      const SourcePtr source = slice(whole, of.first, of.count);
      const Part part = random_part(random, of.count);
      Target target(part.count * scalar_size(wanted));
      read_piece({source, part.first, part.count, nullptr}, target.data(), &mix,
                 random.chance(0.5) ? ReadMode::quick : ReadMode::cheap);
      EXPECT(target.has(right(weights, wanted, of.first + part.first, part.count)));
    }
  }
}

TEST(coded_bytes_that_were_written_through_a_mapping_count) {
  const CodedWeights weights = some_weights(Scalar::bf16, 5 * kBlock, 4);
  const CodedWeights others = some_weights(Scalar::bf16, 5 * kBlock, 5);
  const TempFile file(8 + weights.coded.size());
  write_at(file.path(), 8, weights.coded);
  const PrivateMapping mapping(file.path());
  const std::uint64_t begin = weights.coding->blocks[1];
  const Bytes block = encoded(Scalar::bf16, Bytes(others.plain.begin(), others.plain.begin() + 2 * kBlock));
  if (begin + block.size() != weights.coding->blocks[2]) return;  // no block of its length
  std::memcpy(mapping.data() + 8 + begin, block.data(), block.size());
  auto source = weights.source(Scalar::bf16, file, 8);
  source->address = mapping.data() + 8;
  Target target(weights.plain.size());
  read_piece({source, 0, source->count, nullptr}, target.data(), nullptr, ReadMode::quick);
  Bytes expected = weights.plain;
  std::copy_n(others.plain.begin(), 2 * kBlock, expected.begin() + 2 * kBlock);
  EXPECT(target.has(expected));
}

TEST(coded_neighbours_are_read_together_with_plain_ones) {
  Random random(6);
  for (int round = 0; round < 100; ++round) {
    std::vector<CodedWeights> weights;
    std::vector<std::uint64_t> offsets;
    std::uint64_t end = random.below(100);
    const bool mapped = random.chance(0.3);
    for (std::size_t i = random.between(2, 6); i > 0; --i) {
      weights.push_back(
          some_weights(kCodable[random.below(3)], random.between(1, 3 * kBlock), random.next()));
      end = (end + 3) / 4 * 4 + (random.chance(0.3) ? random.below(20000) / 4 * 4 : 0);
      offsets.push_back(end);
      end += std::max(weights.back().coded.size(), weights.back().plain.size());
    }
    const TempFile file(end);
    std::vector<Piece> pieces;
    std::vector<Target> targets;
    std::vector<Bytes> expected;
    std::vector<bool> plain;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      plain.push_back(random.chance(0.4));
      write_at(file.path(), offsets[i], plain[i] ? weights[i].plain : weights[i].coded);
    }
    const auto opened = File::open(file.path());
    const PrivateMapping mapping(file.path());
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const Scalar wanted = random.chance(0.5) ? weights[i].type : kWanted[random.below(kWanted.size())];
      auto source = weights[i].source(wanted, file, offsets[i]);
      source->file = opened;
      if (plain[i]) source->coding = nullptr;
      if (mapped) source->address = mapping.data() + offsets[i];
      const Part part = random_part(random, source->count);
      pieces.push_back({source, part.first, part.count, nullptr});
      targets.emplace_back(part.count * scalar_size(wanted));
      expected.push_back(right(weights[i], wanted, part.first, part.count));
    }
    evict(file.path());
    std::vector<PieceRead> reads;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].count > 0) reads.push_back({&pieces[i], targets[i].data()});
    }
    read_pieces(reads, &mix, random.chance(0.5) ? ReadMode::quick : ReadMode::cheap);
    for (std::size_t i = 0; i < pieces.size(); ++i) EXPECT(targets[i].has(expected[i]));
  }
}

TEST(coded_bytes_that_are_damaged_are_named) {
  const CodedWeights weights = some_weights(Scalar::f32, 4 * kBlock + 100, 7);
  const TempFile file(32 + weights.coded.size());
  for (const std::size_t block : {0, 2, 4}) {
    CodedWeights damaged = weights;
    damaged.coded[damaged.coding->blocks[block]] = std::byte{7};  // a kind that there is not
    write_at(file.path(), 32, damaged.coded);
    for (const bool from_file : {true, false}) {
      const SourcePtr source =
          from_file ? damaged.source(Scalar::f32, file, 32) : damaged.source(Scalar::f32);
      Target target(damaged.plain.size());
      const auto read = [&] {
        read_piece({source, 0, source->count, nullptr}, target.data(), nullptr, ReadMode::quick);
      };
      EXPECT_THROWS(read(), SourceError);
      const std::string said = message_of(read);
      EXPECT(contains(said, "coded.weight") && contains(said, "block " + std::to_string(block) + " "));
      EXPECT_EQ(contains(said, file.path()), from_file);
      EXPECT(target.around());
      // The other blocks can be read.
      const std::uint64_t other = block == 0 ? kBlock : 0;
      Target good(4 * kBlock);
      read_piece({source, other, kBlock, nullptr}, good.data(), nullptr, ReadMode::quick);
      EXPECT(good.has(right(weights, Scalar::f32, other, kBlock)));
    }
  }
}

TEST(coded_bytes_with_a_damaged_neighbour) {
  const CodedWeights good = some_weights(Scalar::bf16, 2000, 8);
  CodedWeights bad = some_weights(Scalar::bf16, 2000, 9);
  bad.coded[bad.coding->blocks[0]] = std::byte{7};
  const TempFile file(good.coded.size() + bad.coded.size());
  write_at(file.path(), 0, good.coded);
  write_at(file.path(), good.coded.size(), bad.coded);
  auto first = good.source(Scalar::bf16, file, 0), second = bad.source(Scalar::bf16, file, good.coded.size());
  second->name = "the.other";
  second->file = first->file;
  const Piece pieces[] = {{first, 0, 2000, nullptr}, {second, 0, 2000, nullptr}};
  Target one(4000), two(4000);
  std::vector<PieceRead> reads{{&pieces[0], one.data()}, {&pieces[1], two.data()}};
  EXPECT(contains(message_of([&] { read_pieces(reads, nullptr, ReadMode::quick); }), "'the.other'"));
  EXPECT(one.around() && two.around());
}

TEST(coded_chunks_cover_each_piece_once) {
  Random random(10);
  for (int round = 0; round < 20; ++round) {
    std::vector<CodedWeights> weights;
    std::vector<Bytes> expected;
    std::vector<Target> targets;
    std::vector<Piece> pieces;
    for (std::size_t i = random.between(1, 5); i > 0; --i) {
      const std::size_t most = random.chance(0.3) ? 700 * kBlock : 4 * kBlock;
      weights.push_back(some_weights(Scalar::bf16, random.between(1, most), random.next()));
    }
    for (const CodedWeights& each : weights) {
      const Scalar wanted = random.chance(0.6) ? Scalar::bf16 : Scalar::f32;
      auto source = each.source(wanted);
      if (random.chance(0.3)) {
        source->coding = nullptr;
        source->address = each.plain.data();
      }
      const Part of = random_part(random, each.count());
      const Part part = random_part(random, of.count);
      targets.emplace_back(part.count * scalar_size(wanted));
      expected.push_back(right(each, wanted, of.first + part.first, part.count));
      pieces.push_back({slice(source, of.first, of.count), part.first, part.count, targets.back().data()});
    }
    std::uint64_t covered = 0;
    for (Chunk& chunk : cut_into_chunks(pieces)) {
      std::uint64_t bytes = 0;
      std::vector<PieceRead> reads;
      for (const Piece& part : chunk) {
        EXPECT(part.count > 0);
        bytes += stored_bytes(part);
        covered += part.count;
        reads.push_back({&part, part.dst});
      }
      EXPECT(bytes > 0 && bytes <= kChunkBytes);
      read_pieces(reads, &mix, ReadMode::quick);
    }
    for (const Piece& piece : pieces) covered -= piece.count;
    EXPECT_EQ(covered, 0u);
    for (std::size_t i = 0; i < pieces.size(); ++i) EXPECT(targets[i].has(expected[i]));
  }
}
