// host: how a copy is cut into tasks.
#include "host/chunks.h"

#include <memory>
#include <vector>

#include "check.h"
#include "io/aligned_buffer.h"
#include "io/file.h"
#include "random.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

Piece piece(std::uint64_t count, Scalar stored, Scalar wanted, std::byte* dst, std::uint64_t offset = 0,
            std::shared_ptr<const File> file = {}) {
  auto source = std::make_shared<Source>();
  source->stored = stored;
  source->wanted = wanted;
  source->count = count;
  source->offset = offset;
  source->file = std::move(file);
  return {source, 0, count, dst};
}

TEST(chunks_cover_each_piece_once_and_in_order) {
  Random random(11);
  std::byte* const base = nullptr;
  for (int round = 0; round < 200; ++round) {
    std::vector<Piece> pieces;
    for (std::size_t i = random.between(0, 6); i > 0; --i) {
      const bool cast = random.chance(0.5);
      const std::uint64_t count = random.chance(0.5) ? random.below(1000) : random.below(5u << 20);
      pieces.push_back(
          piece(count + 10, Scalar::f32, cast ? Scalar::f16 : Scalar::f32, base + random.below(1000)));
      pieces.back().first = random.below(10);
      pieces.back().count = count;
    }
    std::vector<Piece> rest = pieces;
    std::size_t next = 0;
    const auto skip_done = [&] {
      while (next < rest.size() && rest[next].count == 0) ++next;
    };
    for (const Chunk& chunk : cut_into_chunks(pieces)) {
      std::uint64_t bytes = 0;
      for (const Piece& part : chunk) {
        skip_done();
        EXPECT(next < rest.size() && part.source == rest[next].source);
        if (next == rest.size()) return;
        Piece& whole = rest[next];
        EXPECT_EQ(part.first, whole.first);
        EXPECT(part.dst == whole.dst && part.count > 0 && part.count <= whole.count);
        whole.first += part.count;
        whole.dst += part.count * scalar_size(part.source->wanted);
        whole.count -= part.count;
        bytes += stored_bytes(part);
      }
      EXPECT(bytes > 0 && bytes <= kChunkBytes);
    }
    skip_done();
    EXPECT_EQ(next, rest.size());
  }
}

TEST(chunks_end_where_blocks_of_the_file_end) {
  const TempFile written(1);
  const auto file = File::open(written.path());
  for (const std::uint64_t offset : {0, 8, 64, 5000}) {
    const auto chunks = cut_into_chunks({piece(4u << 20, Scalar::f32, Scalar::f32, nullptr, offset, file)});
    EXPECT_EQ(chunks.size(), (16u << 20) / kChunkBytes + (offset == 0 ? 0 : 1));
    for (std::size_t i = 0; i + 1 < chunks.size(); ++i) {
      const Piece& part = chunks[i].back();
      EXPECT_EQ(chunks[i].size(), 1);
      EXPECT_EQ((offset + part.first * 4 + stored_bytes(part)) % kDirectAlign, 0);
      EXPECT(stored_bytes(part) > kChunkBytes - kDirectAlign);
    }
  }
}

TEST(chunks_put_small_pieces_together) {
  std::vector<Piece> pieces;
  for (int i = 0; i < 100; ++i) pieces.push_back(piece(1000, Scalar::f32, Scalar::f32, nullptr));
  EXPECT_EQ(cut_into_chunks(pieces).size(), 1);
  EXPECT_EQ(cut_into_chunks(pieces)[0].size(), 100);
  EXPECT(cut_into_chunks({}).empty());
}

}  // namespace
