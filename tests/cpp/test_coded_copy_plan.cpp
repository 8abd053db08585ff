// Coded pieces in the plan of a copy to a device, beside plain ones: what lands where, and each element once.
#include "transfer/copy_plan.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "coded_source.h"
#include "core/check.h"
#include "random.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kBlock = lossless::kBlockWeights;
constexpr std::byte kUntouched{0xEE};

/// A ring with small buffers, each with bytes behind it that have to stay.
struct Ring {
  static constexpr std::size_t kGuard = 4096;

  Ring(std::size_t bytes, std::size_t count) : bytes(bytes) {
    std::vector<StagingRing::Buffer> buffers;
    for (std::size_t i = 0; i < count; ++i) {
      memory.emplace_back(static_cast<std::byte*>(::operator new(bytes + kGuard, std::align_val_t{4096})),
                          [](std::byte* at) { ::operator delete(at, std::align_val_t{4096}); });
      std::fill_n(memory.back().get(), bytes + kGuard, kUntouched);
      buffers.push_back(memory.back());
    }
    ring = std::make_unique<StagingRing>(std::move(buffers), bytes, 2, &mix);
  }
  ~Ring() {
    ring->close();
    for (const auto& buffer : memory) {
      EXPECT(std::all_of(buffer.get() + bytes, buffer.get() + bytes + kGuard,
                         [](std::byte byte) { return byte == kUntouched; }));
    }
  }
  std::size_t bytes;
  std::vector<StagingRing::Buffer> memory;
  std::unique_ptr<StagingRing> ring;
};

/// What the device does with a landing. Adds what it has written.
void land(const Landing& landing, std::uint64_t& written) {
  const Piece& piece = landing.piece;
  const Source& source = *piece.source;
  const std::size_t wanted = scalar_size(source.wanted), stored = scalar_size(source.stored);
  written += piece.count;
  EXPECT(piece.count > 0);
  if (landing.index == nullptr) {
    if (!landing.convert) {
      std::memcpy(piece.dst, landing.from, piece.count * wanted);
    } else {
      EXPECT(!source.coding);
      mix(piece.dst, source.wanted, landing.from, source.stored, piece.count);
    }
    return;
  }
  EXPECT(landing.convert && source.coding);
  const Coding& coding = *source.coding;
  const std::uint64_t begin = source.coded_first + piece.first, end = begin + piece.count;
  const std::uint64_t first = begin / kBlock, last = (end - 1) / kBlock;
  std::vector<std::uint64_t> index(last - first + 2);
  std::memcpy(index.data(), landing.index, index.size() * sizeof(std::uint64_t));
  std::byte* dst = piece.dst;
  for (std::uint64_t block = first; block <= last; ++block) {
    EXPECT_EQ(index[block - first], coding.blocks[block]);
    const std::uint64_t of = block * kBlock;
    const std::uint64_t weights = std::min<std::uint64_t>(kBlock, coding.weights - of);
    const std::uint64_t from = std::max(begin, of) - of, to = std::min(end, of + weights) - of;
    Bytes decoded((to - from) * stored);
    EXPECT(lossless::decode_block(source.stored, landing.from + (index[block - first] - index[0]),
                                  index[block - first + 1] - index[block - first], weights, from, to - from,
                                  decoded.data()));
    if (source.cast())
      mix(dst, source.wanted, decoded.data(), source.stored, to - from);
    else
      std::memcpy(dst, decoded.data(), decoded.size());
    dst += (to - from) * wanted;
  }
  EXPECT_EQ(index.back(), coding.blocks[last + 1]);
}

/// Plans and carries out a request as a stream does. Returns how many elements were written.
std::uint64_t carry_out(const CopyRequest& request, DeviceAbilities device, Ring* ring,
                        const std::shared_ptr<Reads>& reads) {
  std::uint64_t written = 0;
  StagingRing* const staging = ring == nullptr ? nullptr : ring->ring.get();
  const std::vector<CopyBatch> batches = plan_copies(request, device, staging, reads);
  for (const CopyBatch& batch : batches) {
    if (batch.chunk) staging->arrive(*batch.chunk);
    for (const Landing& landing : batch.landings) land(landing, written);
  }
  if (staging != nullptr) {
    staging->passed(staging->next());
    EXPECT(staging->wait(*reads, std::chrono::minutes(1)));
  }
  return written;
}

enum class Where { ram, file, pinned, pinned_copy };

}  // namespace

TEST(coded_pieces_land_beside_plain_ones) {
  Random random(21);
  constexpr std::array kWanted{Scalar::f64,  Scalar::f32,     Scalar::f16,
                               Scalar::bf16, Scalar::f8_e5m2, Scalar::f8_e4m3fn};
  for (int round = 0; round < 60; ++round) {
    Ring ring(random.chance(0.5) ? 32u << 10 : 200u << 10, random.between(1, 3));
    const DeviceAbilities device{.casts = random.chance(0.8), .decodes = random.chance(0.8)};
    std::vector<CodedWeights> weights;
    std::vector<std::unique_ptr<TempFile>> files;
    std::vector<Bytes> targets, expected;
    std::vector<std::shared_ptr<Source>> sources;
    const std::size_t pieces = random.between(1, 6);
    weights.reserve(pieces);
    CopyRequest request;
    request.steps.resize(2);
    std::uint64_t count = 0;
    for (std::size_t i = 0; i < pieces; ++i) {
      const CodedWeights& each = weights.emplace_back(
          some_weights(kCodable[random.below(3)], random.between(1, 40 * kBlock), random.next()));
      const Scalar wanted = random.chance(0.5) ? each.type : kWanted[random.below(kWanted.size())];
      const bool plain = random.chance(0.3);
      const Bytes& bytes = plain ? each.plain : each.coded;
      std::shared_ptr<Source> source = each.source(wanted);
      source->address = bytes.data();
      switch (static_cast<Where>(random.below(4))) {
        case Where::ram:
          break;
        case Where::file: {
          const std::uint64_t offset = random.chance(0.5) ? 16 * random.below(600) : 4 * random.below(3000);
          files.push_back(std::make_unique<TempFile>(offset + bytes.size(), random.next()));
          write_at(files.back()->path(), offset, bytes);
          source = each.source(wanted, *files.back(), offset);
          break;
        }
        case Where::pinned:
          source->pinned = true;
          break;
        case Where::pinned_copy:
          source->pinned = true;
          source->pinned_copy = std::make_shared<PinnedCopy>();
          source->pinned_copy->bytes =
              std::shared_ptr<std::byte>(new std::byte[bytes.size()](), [](std::byte* at) { delete[] at; });
          break;
      }
      if (plain) source->coding = nullptr;
      SourcePtr part = source;
      std::uint64_t begin = 0;
      if (random.chance(0.5)) {
        begin = random.below(each.count());
        part = slice(source, begin, random.between(1, each.count() - begin));
      }
      const std::uint64_t first = random.below(part->count);
      const std::uint64_t length = random.chance(0.05) ? 0 : random.between(1, part->count - first);
      expected.push_back(right(each, wanted, begin + first, length));
      expected.back().insert(expected.back().end(), 32, kUntouched);
      targets.emplace_back(expected.back().size(), kUntouched);
      request.steps[random.below(2)].pieces.push_back({part, first, length, targets.back().data()});
      count += length;
    }
    EXPECT_EQ(carry_out(request, device, &ring, std::make_shared<Reads>()), count);
    for (std::size_t i = 0; i < pieces; ++i) EXPECT(targets[i] == expected[i]);
  }
}

TEST(coded_bytes_cross_the_bus_where_the_device_decodes) {
  const CodedWeights weights = some_weights(Scalar::bf16, 20 * kBlock, 22);
  const auto source = weights.source(Scalar::f32);
  EXPECT(!converted_by_readers(*source, {.casts = true, .decodes = true}));
  EXPECT(converted_by_readers(*source, {.casts = true, .decodes = false}));
  EXPECT(converted_by_readers(*source, {.casts = false, .decodes = true}));
  source->wanted = Scalar::f8_e5m2;  // fewer bytes than it has coded
  EXPECT(converted_by_readers(*source, {.casts = true, .decodes = true}));
  source->pinned = true;
  EXPECT(copy_path(*source, {.casts = true, .decodes = true}) == CopyPath::convert_after);
  source->wanted = Scalar::f8_e4m3fn;
  EXPECT(copy_path(*source, {.casts = true, .decodes = true}) == CopyPath::staged);
  source->wanted = Scalar::bf16;
  EXPECT(copy_path(*source, {.casts = true, .decodes = false}) == CopyPath::staged);
}

TEST(coded_bytes_that_are_damaged_fail_the_reads_that_decode_them) {
  CodedWeights weights = some_weights(Scalar::bf16, 9 * kBlock, 23);
  weights.coded[weights.coding->blocks[5]] = std::byte{7};
  Ring ring(64u << 10, 2);
  const auto reads = std::make_shared<Reads>();
  Bytes target(weights.plain.size());
  CopyRequest request;
  request.steps.push_back({{}, {{weights.source(Scalar::bf16), 0, weights.count(), target.data()}}});
  const std::string said =
      message_of([&] { carry_out(request, {.casts = true, .decodes = false}, &ring, reads); });
  EXPECT(contains(said, "'coded.weight'") && contains(said, "block 5 "));
}
