// Tensors in the lossless code: their index, and threads that code them.
#include "lossless/tensor.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "lossless_weights.h"

namespace dynswap::test {

using namespace lossless;

namespace {

bool decoded_is(Scalar type, const Bytes& coded, const Bytes& weights, std::size_t first, std::size_t count) {
  const std::size_t size = scalar_size(type);
  Bytes out(count * size);
  return decode_tensor(type, coded.data(), coded.size(), weights.size() / size, first, count, out.data()) &&
         (count == 0 || std::memcmp(out.data(), weights.data() + first * size, count * size) == 0);
}

}  // namespace

TEST(lossless_tensors_of_every_size) {
  for (const Scalar type : kCodable) {
    for (const std::size_t count : {0, 1, 255, 256, 257, 4095, 4096, 4097, 8192, 12345, 40000}) {
      const Bytes weights = trained(type, count, count + 1);
      const Bytes coded = encoded_tensor(type, weights);
      EXPECT_EQ(check_tensor(type, coded.data(), coded.size(), count), "");
      EXPECT(decoded_is(type, coded, weights, 0, count));
      Bytes by_the_page;
      std::size_t offset = ((count + 4095) / 4096 + 1 + 1) / 2 * 16;
      Bytes blocks;
      for (std::size_t at = 0; at < weights.size(); at += 4096 * scalar_size(type)) {
        put(by_the_page, offset + blocks.size(), 8);
        const std::size_t end = std::min(weights.size(), at + 4096 * scalar_size(type));
        const Bytes block =
            block_by_the_page(type, Bytes(weights.begin() + static_cast<std::ptrdiff_t>(at),
                                          weights.begin() + static_cast<std::ptrdiff_t>(end)));
        blocks.insert(blocks.end(), block.begin(), block.end());
      }
      put(by_the_page, offset + blocks.size(), 8);
      by_the_page.resize(offset);
      by_the_page.insert(by_the_page.end(), blocks.begin(), blocks.end());
      EXPECT(coded == by_the_page);
    }
  }
}

TEST(lossless_parts_of_a_tensor) {
  Random random(1);
  for (const Scalar type : kCodable) {
    const std::size_t count = 3 * kBlockWeights + 77;
    const Bytes weights = trained(type, count, 8);
    const Bytes coded = encoded_tensor(type, weights);
    for (int trial = 0; trial < 100; ++trial) {
      const std::size_t first = random.below(count + 1);
      EXPECT(decoded_is(type, coded, weights, first, random.below(count - first + 1)));
    }
    EXPECT(!decoded_is(type, coded, weights, count, 1));
    EXPECT(!decoded_is(type, coded, weights, 1, count));
  }
}

TEST(lossless_tensors_say_whether_they_pay) {
  for (const Scalar type : kCodable) {
    const auto pays = [&](const Bytes& weights) {
      return Encoder(type, weights.data(), weights.size() / scalar_size(type), 1).pays();
    };
    EXPECT(pays(trained(type, 20000, 1)));
    EXPECT(!pays(trained(type, 20, 1)));
    EXPECT(!pays({}));
    if (type != Scalar::f16) EXPECT(!pays(noise(type, 20000, 1)));
    EXPECT(encoded_tensor(type, noise(type, 20000, 1)).size() <=
           20000 * scalar_size(type) + index_bytes(20000) + 5 * kHeaderBytes);
  }
  EXPECT_THROWS(Encoder(Scalar::f64, nullptr, 0, 1), Error);
}

TEST(lossless_tensors_are_the_same_with_any_number_of_threads) {
  for (const Scalar type : kCodable) {
    const Bytes weights = trained(type, 300 * kBlockWeights + 5, 4);
    const Bytes coded = encoded_tensor(type, weights, 1);
    for (const int threads : {0, 2, 3, 16}) EXPECT(encoded_tensor(type, weights, threads) == coded);
    EXPECT(decoded_is(type, coded, weights, 0, weights.size() / scalar_size(type)));
  }
}

TEST(lossless_tensors_that_change_while_they_are_coded_are_an_error) {
  for (const Scalar type : kCodable) {
    Bytes weights = trained(type, 3 * kBlockWeights, 4);
    const Encoder encoder(type, weights.data(), 3 * kBlockWeights, 1);
    Bytes coded(encoder.bytes());  // of just so many bytes that a write behind them is seen
    const Bytes others = noise(type, 3 * kBlockWeights, 4);
    std::copy(others.begin(), others.end(), weights.begin());
    EXPECT_THROWS(encoder.write(coded.data()), Error);
    std::fill(weights.begin(), weights.end(), std::byte{0});  // fewer escapes
    EXPECT_THROWS(encoder.write(coded.data()), Error);
  }
}

TEST(lossless_tensors_whose_index_is_damaged_are_refused) {
  const std::size_t count = 5 * kBlockWeights + 1;
  const Bytes coded = encoded_tensor(Scalar::bf16, trained(Scalar::bf16, count, 9));
  const auto wrong = [&](Bytes damaged, std::size_t weights) {
    damaged.shrink_to_fit();
    return check_index(Scalar::bf16, damaged.data(), damaged.size(), weights);
  };
  EXPECT_EQ(wrong(coded, count), "");
  EXPECT(wrong(coded, count + kBlockWeights) != "");
  EXPECT(wrong(coded, kBlockWeights) != "");
  EXPECT(wrong(Bytes(coded.begin(), coded.end() - 16), count) != "");
  EXPECT(wrong(Bytes(coded.begin(), coded.begin() + 40), count) != "");
  EXPECT(wrong({}, count) != "");
  EXPECT(check_index(Scalar::f64, coded.data(), coded.size(), count) != "");
  for (std::size_t entry = 0; entry < 7; ++entry) {
    const std::uint64_t is = get(coded, 8 * entry, 8);
    for (const std::uint64_t moved :
         {is + 1, is + 16, is - 32, is + (1u << 20), is - (1u << 20), is + (std::uint64_t{1} << 63),
          ~std::uint64_t{15}, ~std::uint64_t{127}, std::uint64_t{0}}) {
      Bytes damaged = coded;
      for (std::size_t i = 0; i < 8; ++i) damaged[8 * entry + i] = static_cast<std::byte>(moved >> 8 * i);
      EXPECT(check_tensor(Scalar::bf16, damaged.data(), damaged.size(), count) != "");
      Bytes out(2 * count);
      EXPECT(!decode_tensor(Scalar::bf16, damaged.data(), damaged.size(), count, 0, count, out.data()));
    }
  }
}

TEST(lossless_tensors_with_random_damage_are_refused_or_harmless) {
  Random random(2);
  for (const Scalar type : kCodable) {
    const std::size_t count = 2 * kBlockWeights + 300;
    const Bytes coded = encoded_tensor(type, trained(type, count, 2));
    for (int trial = 0; trial < 300; ++trial) {
      Bytes damaged = coded;
      const std::size_t at = random.below(random.chance(0.5) ? 80 : damaged.size());
      damaged[at] ^= static_cast<std::byte>(random.between(1, 255));
      if (random.chance(0.3)) damaged.resize(random.below(damaged.size()));
      damaged.shrink_to_fit();
      Bytes out(count * scalar_size(type));
      const bool decoded = decode_tensor(type, damaged.data(), damaged.size(), count, 0, count, out.data());
      if (decoded) EXPECT_EQ(check_tensor(type, damaged.data(), damaged.size(), count), "");
    }
  }
}

}  // namespace dynswap::test
