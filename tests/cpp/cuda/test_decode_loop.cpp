// The lanes of the decode kernels, one after the other, against the weights that were coded.
#include "cuda/decode_loop.h"

#include <cstddef>
#include <cstring>
#include <vector>

#include "check.h"
#include "lossless_weights.h"
#include "pretend_gpu.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::byte kUntouched{0xA5};
constexpr std::size_t kBefore = 16;  ///< elements before `dst`, and as many behind

/// Blocks of a tensor, in memory of just so many bytes that a read outside them is seen.
struct Blocks {
  Blocks(Scalar type, const Bytes& weights, std::size_t first_block = 0) : type(type) {
    const Bytes tensor = encoded_tensor(type, weights);
    const std::size_t size = scalar_size(type);
    const std::size_t blocks = lossless::blocks_of(weights.size() / size);
    for (std::size_t i = first_block; i <= blocks; ++i) index.push_back(get(tensor, 8 * i, 8));
    coded.assign(tensor.begin() + static_cast<std::ptrdiff_t>(index[0]), tensor.end());
    count = weights.size() / size - first_block * lossless::kBlockWeights;
    plain.assign(weights.end() - static_cast<std::ptrdiff_t>(count * size), weights.end());
  }
  Decoding part(std::size_t first, std::size_t wanted) const {
    return {{coded.data(), index.data(), index.size() - 1, count}, type, first, wanted};
  }

  Scalar type;
  Bytes coded;
  std::vector<std::uint64_t> index;
  std::size_t count;
  Bytes plain;
};

template <class To, class From>
void check_part(const Blocks& blocks, Scalar to, std::size_t first, std::size_t wanted, std::size_t shifted) {
  Bytes expected((kBefore + shifted + wanted + kBefore) * sizeof(To), kUntouched);
  const std::size_t begin = (kBefore + shifted) * sizeof(To);
  const std::byte* const plain = blocks.plain.data() + first * sizeof(From);
  if (to == blocks.type) {
    std::memcpy(expected.data() + begin, plain, wanted * sizeof(From));
  } else {
    gpu::cast(expected.data() + begin, to, plain, blocks.type, wanted);
  }
  for (const std::size_t warps : {1, 3, 64}) {
    Bytes target(expected.size(), kUntouched);
    for (std::size_t warp = 0; warp < warps; ++warp) {
      decode_on_host<To, From>(reinterpret_cast<To*>(target.data() + begin), blocks.part(first, wanted), warp,
                               warps);
    }
    EXPECT(target == expected);
  }
}

template <class To, class From>
void check_pair(Scalar to, Scalar from) {
  const std::size_t block = lossless::kBlockWeights;
  Bytes weights = trained(from, 2 * block, 1);
  const Bytes raw = noise(from, block, 2);  // a block that is not coded, and others that end anywhere
  weights.insert(weights.end(), raw.begin(), raw.end());
  for (const std::size_t last : {1, 5, 300, 701, 4096}) {
    Bytes all = weights;
    const Bytes end = last % 2 == 0 ? trained(from, last, last) : noise(from, last, last);
    all.insert(all.end(), end.begin(), end.end());
    for (const std::size_t first_block : {0, 1, 3}) {
      const Blocks blocks(from, all, first_block);
      check_part<To, From>(blocks, to, 0, blocks.count, 0);
      check_part<To, From>(blocks, to, 0, blocks.count, 1);
      check_part<To, From>(blocks, to, blocks.count - 1, 1, 0);
      check_part<To, From>(blocks, to, blocks.count / 3, blocks.count / 2, 3);
      check_part<To, From>(blocks, to, blocks.count / 7, 0, 0);
    }
  }
}

template <class To>
void check_to(Scalar to) {
  check_pair<To, float>(to, Scalar::f32);
  check_pair<To, F16>(to, Scalar::f16);
  check_pair<To, BF16>(to, Scalar::bf16);
}

TEST(the_lanes_decode_to_f64) { check_to<double>(Scalar::f64); }
TEST(the_lanes_decode_to_f32) { check_to<float>(Scalar::f32); }
TEST(the_lanes_decode_to_f16) { check_to<F16>(Scalar::f16); }
TEST(the_lanes_decode_to_bf16) { check_to<BF16>(Scalar::bf16); }
TEST(the_lanes_decode_to_f8_e5m2) { check_to<F8E5M2>(Scalar::f8_e5m2); }

template <class From>
void check_damage(Scalar type) {
  Random random(3);
  const std::size_t count = lossless::kBlockWeights + 900;
  const Blocks blocks(type, trained(type, count, 6));
  for (int trial = 0; trial < 200; ++trial) {
    Blocks damaged = blocks;
    for (std::size_t hits = random.between(1, 4); hits > 0; --hits) {
      const std::size_t block = random.below(2);
      const std::size_t begin = block == 0 ? 0 : damaged.index[1] - damaged.index[0];
      damaged.coded[begin + random.below(random.chance(0.7) ? 48 : 1400)] =
          static_cast<std::byte>(random.next());
    }
    // A block that is shorter than its kind says.
    if (random.chance(0.3)) {
      damaged.index.back() = damaged.index[1] + 16 * random.between(1, 20);
      damaged.coded.resize(damaged.index.back() - damaged.index[0]);
    }
    damaged.coded.shrink_to_fit();
    Bytes target((count + 8) * sizeof(From), kUntouched);
    decode_on_host<From, From>(reinterpret_cast<From*>(target.data()), damaged.part(0, count), 0, 1);
    for (std::size_t i = count * sizeof(From); i < target.size(); ++i) EXPECT(target[i] == kUntouched);
  }
}

TEST(the_lanes_read_nothing_outside_damaged_blocks) {
  check_damage<BF16>(Scalar::bf16);
  check_damage<F16>(Scalar::f16);
  check_damage<float>(Scalar::f32);
}

}  // namespace
