// Blocks of the lossless code: what is decoded is what was coded, to the bit.
#include "lossless/code.h"

#include <array>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "check.h"
#include "lossless_weights.h"

namespace dynswap::test {

using namespace lossless;

namespace {

constexpr std::array<Instructions, 2> kInstructions = {Instructions::portable, Instructions::best};
constexpr std::byte kUntouched{0xA5};

/// A part of a block: equal, and nothing written beside it.
void check_part(Scalar type, const Bytes& weights, const Bytes& block, std::size_t first, std::size_t count) {
  const std::size_t size = scalar_size(type);
  for (const Instructions instructions : kInstructions) {
    Bytes decoded((count + 2) * size, kUntouched);
    EXPECT(decode_block(type, block.data(), block.size(), weights.size() / size, first, count,
                        decoded.data() + size, instructions));
    EXPECT(std::memcmp(decoded.data() + size, weights.data() + first * size, count * size) == 0);
    for (std::size_t i = 0; i < size; ++i) {
      EXPECT(decoded[i] == kUntouched && decoded[decoded.size() - 1 - i] == kUntouched);
    }
  }
}

/// Codes weights, up to a block at a time. Returns the blocks' bytes.
std::size_t check(Scalar type, const Bytes& weights) {
  const std::size_t most = kBlockWeights * scalar_size(type);
  std::size_t bytes = 0;
  for (std::size_t at = 0; at < weights.size(); at += most) {
    const Bytes part(weights.begin() + static_cast<std::ptrdiff_t>(at),
                     weights.begin() + static_cast<std::ptrdiff_t>(std::min(at + most, weights.size())));
    const Bytes block = encoded(type, part);
    EXPECT(block.size() <= raw_block_bytes(type, part.size() / scalar_size(type)));
    EXPECT(block == block_by_the_page(type, part));
    EXPECT(check_block(type, block.data(), block.size(), part.size() / scalar_size(type)) == nullptr);
    check_part(type, part, block, 0, part.size() / scalar_size(type));
    bytes += block.size();
  }
  return bytes;
}

}  // namespace

TEST(lossless_blocks_keep_every_pattern_of_16_bits) {
  for (const Scalar type : {Scalar::bf16, Scalar::f16}) {
    const unsigned mantissa = Bits(type).exponent;
    Bytes by_exponent, mixed;
    for (std::uint64_t i = 0; i < 65536; ++i) {
      const std::uint64_t exponent = i >> (mantissa + 1) << mantissa;
      put(by_exponent, (i >> mantissa & 1) << 15 | exponent | (i & ((1u << mantissa) - 1)), 2);
      put(mixed, i * 40503 % 65536, 2);
    }
    EXPECT(check(type, by_exponent) < by_exponent.size());  // each block is coded
    check(type, mixed);
  }
}

TEST(lossless_blocks_keep_special_weights) {
  Bytes specials;
  for (const std::uint32_t bits :
       {0u, 0x80000000u, 1u, 0x80000001u, 0x7FFFFFu, 0x800000u, 0x7F800000u, 0xFF800000u, 0x7FC00000u,
        0x7F800001u, 0xFFFFFFFFu, 0x7FA5A5A5u, 0x7F7FFFFFu, 0x3F800000u, 0xBF800001u}) {
    put(specials, bits, 4);
  }
  Bytes among = trained(Scalar::f32, 4000, 3);
  for (std::size_t i = 0; i < 4; ++i) {
    among.insert(among.begin() + static_cast<std::ptrdiff_t>(1234 * i * 4), specials.begin(), specials.end());
  }
  check(Scalar::f32, specials);
  check(Scalar::f32, among);
  EXPECT(encoded(Scalar::f32, Bytes(among.begin(), among.begin() + 16384))[0] == std::byte{1});
}

TEST(lossless_blocks_of_every_size) {
  for (const Scalar type : kCodable) {
    for (const std::size_t count : {1,   2,   7,   8,    9,    63,   64,   65,   255,  256,  257,
                                    511, 512, 513, 1000, 2049, 3840, 3841, 4095, 4096, 4097, 9001}) {
      check(type, trained(type, count, count));
      check(type, noise(type, count, count));
      check(type, Bytes(count * scalar_size(type)));                   // zeros
      check(type, Bytes(count * scalar_size(type), std::byte{0x3D}));  // one weight, often
    }
  }
}

TEST(lossless_blocks_of_few_and_of_all_exponents) {
  for (const Scalar type : kCodable) {
    for (unsigned exponents = 1; exponents < Bits(type).most; exponents += exponents < 12 ? 1 : 37) {
      Random random(exponents);
      const auto draw = [&] { return static_cast<unsigned>(Bits(type).most - random.below(exponents)); };
      const std::size_t bytes = check(type, weights_with(type, kBlockWeights, random, draw));
      // 7 need no escapes, not even when the last of them is 0.
      if (exponents <= 7) EXPECT_EQ(bytes, parts_of(type, kBlockWeights).escapes);
      const auto small = [&] { return static_cast<unsigned>(random.below(exponents)); };
      if (exponents <= 7) {
        EXPECT_EQ(check(type, weights_with(type, kBlockWeights, random, small)),
                  parts_of(type, kBlockWeights).escapes);
      }
    }
  }
}

TEST(lossless_blocks_whose_escapes_are_all_in_one_place) {
  for (const Scalar type : kCodable) {
    for (const std::size_t first : {0, 250, 3840, 4000, 4090}) {
      Random random(first);
      std::size_t i = 0;
      const auto draw = [&] {
        const std::size_t at = i++;
        return at >= first && at < first + 200 ? static_cast<unsigned>(random.below(16)) + 8 : 7u;
      };
      check(type, weights_with(type, kBlockWeights, random, draw));
    }
  }
}

TEST(lossless_parts_of_a_block) {
  for (const Scalar type : kCodable) {
    for (const std::size_t weights : {std::size_t{700}, kBlockWeights}) {
      for (const Bytes& all : {trained(type, weights, 5), noise(type, weights, 5)}) {
        const Bytes block = encoded(type, all);
        for (const std::size_t first : {0, 1, 7, 255, 256, 257, 512, 699}) {
          for (const std::size_t count : {0, 1, 2, 8, 254, 255, 256, 257, 513}) {
            if (first + count <= weights) check_part(type, all, block, first, count);
          }
          check_part(type, all, block, first, weights - first);
        }
        std::array<std::byte, 64> target;
        for (const auto& [first, count] :
             {std::pair{weights, std::size_t{1}}, std::pair{weights + 1, std::size_t{0}},
              std::pair{std::size_t{1}, std::numeric_limits<std::size_t>::max()}}) {
          EXPECT(!decode_block(type, block.data(), block.size(), weights, first, count, target.data()));
        }
      }
    }
  }
}

TEST(lossless_blocks_of_other_types_are_refused) {
  const Bytes block = encoded(Scalar::bf16, trained(Scalar::bf16, 512, 1));
  std::array<std::byte, 8> target;
  for (const Scalar type : {Scalar::f64, Scalar::f8_e5m2, Scalar::raw16}) {
    EXPECT(!codable(type));
    EXPECT(!decode_block(type, block.data(), block.size(), 512, 0, 1, target.data()));
    EXPECT(check_block(type, block.data(), block.size(), 512) != nullptr);
  }
}

TEST(lossless_blocks_that_are_damaged_are_noticed_or_harmless) {
  std::size_t noticed = 0;
  std::size_t unsound = 0;
  for (const Scalar type : kCodable) {
    for (const std::size_t weights : {std::size_t{500}, std::size_t{1500}, kBlockWeights}) {
      const Bytes block = encoded(type, trained(type, weights, weights));
      EXPECT(block[0] == std::byte{1});
      Random random(weights);
      for (int trial = 0; trial < 300; ++trial) {
        Bytes damaged = block;  // of just so many bytes that a read behind them is seen
        const std::size_t head = 48;
        for (std::size_t hits = random.between(1, 4); hits > 0; --hits) {
          const std::size_t at = random.below(random.chance(0.7) ? head : damaged.size());
          damaged[at] = static_cast<std::byte>(random.next());
        }
        if (random.chance(0.2)) damaged.resize(random.below(damaged.size() + 1));
        damaged.shrink_to_fit();
        const std::size_t first = random.below(weights);
        const std::size_t count = random.between(1, weights - first);
        std::array<bool, 2> decoded;
        std::array<Bytes, 2> out;
        for (std::size_t i = 0; i < 2; ++i) {
          out[i] = Bytes(count * scalar_size(type), kUntouched);
          decoded[i] = decode_block(type, damaged.data(), damaged.size(), weights, first, count,
                                    out[i].data(), kInstructions[i]);
        }
        EXPECT(decoded[0] == decoded[1] && (!decoded[0] || out[0] == out[1]));
        noticed += decoded[0] ? 0 : 1;
        unsound += check_block(type, damaged.data(), damaged.size(), weights) != nullptr ? 1 : 0;
      }
    }
  }
  EXPECT(noticed > 500 && unsound > 500);
}

TEST(lossless_directories_that_do_not_begin_with_0_are_refused) {
  constexpr std::size_t kWeights = 500;
  for (const Scalar type : kCodable) {
    Bytes block = encoded(type, trained(type, kWeights, 3));
    EXPECT(block[0] == std::byte{1});
    const auto add_one = [&](std::size_t at) {
      std::uint16_t number = 0;
      std::memcpy(&number, &block[at], sizeof(number));
      ++number;
      std::memcpy(&block[at], &number, sizeof(number));
    };
    add_one(kEscapesAt);
    for (std::size_t run = 0; run < kRuns; ++run) add_one(kHeaderBytes + 2 * run);
    block.resize(align_up(block.size() + 1, kAlignment));
    Bytes out(kWeights * scalar_size(type));
    for (const std::size_t bytes : {block.size() - kAlignment, block.size()}) {
      for (const Instructions instructions : kInstructions)
        EXPECT(!decode_block(type, block.data(), bytes, kWeights, 0, kWeights, out.data(), instructions));
    }
  }
}

}  // namespace dynswap::test
