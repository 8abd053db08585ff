// The hash by which small ranges of memory are watched.
#include "io/hash.h"

#include <array>
#include <cstring>
#include <set>
#include <vector>

#include "check.h"

namespace dynswap::test {

namespace {

std::uint64_t hash_of(const std::vector<std::byte>& data) {
  Hash hash;
  hash.add(data.data(), data.size());
  return hash.value();
}

}  // namespace

// Sizes below a block, of whole blocks, and with a rest.
constexpr std::array<std::size_t, 8> kSizes = {1, 8, 33, 255, 512, 768, 1024, 1531};

TEST(hash_sees_each_bit) {
  for (const std::size_t size : kSizes) {
    std::vector<std::byte> data(size, std::byte{7});
    const std::uint64_t before = hash_of(data);
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      data[bit / 8] ^= std::byte{1} << (bit % 8);
      EXPECT(hash_of(data) != before);
      data[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    EXPECT_EQ(hash_of(data), before);
  }
}

TEST(hash_tells_what_weights_become_apart) {
  for (const std::size_t size : kSizes) {
    if (size < sizeof(float)) continue;
    std::vector<float> weights(size / sizeof(float));
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = 1.0f / static_cast<float>(i + 1);
    std::set<std::uint64_t> seen;
    std::size_t states = 0;
    const auto see = [&](const std::vector<float>& now) {
      std::vector<std::byte> data(now.size() * sizeof(float));
      std::memcpy(data.data(), now.data(), data.size());
      seen.insert(hash_of(data));
      ++states;
    };
    see(weights);
    for (std::size_t first = 0; first < weights.size(); ++first) {  // signs of two
      for (std::size_t second = first; second < weights.size(); ++second) {
        std::vector<float> changed = weights;
        changed[first] = -changed[first];
        if (second != first) changed[second] = -changed[second];
        see(changed);
      }
    }
    for (const float factor : {0.0f, -1.0f, 2.0f, 0.5f}) {  // of all, and of every other
      for (const std::size_t step : {1u, 2u}) {
        std::vector<float> changed = weights;
        for (std::size_t i = 0; i < changed.size(); i += step) changed[i] *= factor;
        if (changed != weights && (weights.size() > 2 || (step == 1 && factor != -1.0f))) see(changed);
      }
    }
    EXPECT_EQ(seen.size(), states);
  }
}

}  // namespace dynswap::test
