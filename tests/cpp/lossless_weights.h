// Weights for the tests of the lossless code, and the code once more, as docs/lossless.md describes it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lossless/tensor.h"
#include "random.h"

namespace dynswap::test {

using Bytes = std::vector<std::byte>;
inline constexpr std::array<Scalar, 3> kCodable = {Scalar::bf16, Scalar::f32, Scalar::f16};

/// The size of a type in bytes, the place of its exponent, and the largest exponent.
struct Bits {
  explicit Bits(Scalar type)
      : size(scalar_size(type)),
        exponent(type == Scalar::f32   ? 23
                 : type == Scalar::f16 ? 10
                                       : 7),
        most(type == Scalar::f16 ? 31 : 255) {}
  std::size_t size;
  unsigned exponent;
  unsigned most;
};

inline void put(Bytes& to, std::uint64_t number, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) to.push_back(static_cast<std::byte>(number >> 8 * i));
}
inline std::uint64_t get(const Bytes& from, std::size_t at, std::size_t bytes) {
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < bytes; ++i) number |= std::to_integer<std::uint64_t>(from[at + i]) << 8 * i;
  return number;
}

/// Random signs and mantissas, and exponents that `draw` gives.
template <class Draw>
Bytes weights_with(Scalar type, std::size_t count, Random& random, const Draw& draw) {
  const Bits bits(type);
  Bytes weights;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t mantissa = random.next() & ((1u << bits.exponent) - 1);
    const std::uint64_t sign = random.below(2) << (8 * bits.size - 1);
    put(weights, sign | std::uint64_t{draw()} << bits.exponent | mantissa, bits.size);
  }
  return weights;
}

/// Weights as a trained layer has them: each smaller exponent half as often as the one above it.
inline Bytes trained(Scalar type, std::size_t count, std::uint64_t seed) {
  Random random(seed);
  const unsigned largest = type == Scalar::f16 ? 12 : 122;
  return weights_with(type, count, random, [&] {
    unsigned exponent = largest;
    while (exponent > 0 && random.chance(0.5)) --exponent;
    return exponent;
  });
}

/// Weights that have every exponent equally often.
inline Bytes noise(Scalar type, std::size_t count, std::uint64_t seed) {
  Random random(seed);
  return weights_with(type, count, random,
                      [&] { return static_cast<unsigned>(random.below(Bits(type).most + std::size_t{1})); });
}

inline Bytes encoded(Scalar type, const Bytes& weights) {
  Bytes block(lossless::most_block_bytes(type));
  block.resize(
      lossless::encode_block(type, weights.data(), weights.size() / scalar_size(type), block.data()));
  return block;
}

inline Bytes encoded_tensor(Scalar type, const Bytes& weights, int threads = 1) {
  const lossless::Encoder encoder(type, weights.data(), weights.size() / scalar_size(type), threads);
  Bytes coded(encoder.bytes(), std::byte{0xA5});
  encoder.write(coded.data());
  return coded;
}

/// A block as docs/lossless.md describes it, weight by weight.
inline Bytes block_by_the_page(Scalar type, const Bytes& weights) {
  const Bits bits(type);
  const std::size_t count = weights.size() / bits.size;
  const std::size_t padded = (count + 255) / 256 * 256;
  std::vector<unsigned> exponents;
  Bytes low, bytes;
  std::vector<unsigned> low3(padded);
  for (std::size_t i = 0; i < padded; ++i) {
    const std::uint64_t all = i < count ? get(weights, i * bits.size, bits.size) : 0;
    if (i < count) exponents.push_back(static_cast<unsigned>(all >> bits.exponent) & bits.most);
    const auto sign = static_cast<unsigned>(all >> (8 * bits.size - 1) << 7);
    put(bytes, sign | (all >> (bits.exponent - 7) & 127), 1);
    if (type == Scalar::f32) put(low, all & 0xFFFF, 2);
    low3[i] = static_cast<unsigned>(all & 7);
  }
  std::vector<unsigned> order, often(256);
  for (unsigned exponent = 0; exponent < 256; ++exponent) order.push_back(exponent);
  for (const unsigned exponent : exponents) ++often[exponent];
  std::stable_sort(order.begin(), order.end(), [&](unsigned a, unsigned b) { return often[a] > often[b]; });
  std::vector<unsigned> codes(padded);
  Bytes escapes, ranks;
  for (std::size_t i = 0; i < 4096; ++i) {
    if (i % 256 == 0) put(ranks, escapes.size(), 2);
    if (i >= count) continue;
    codes[i] =
        static_cast<unsigned>(std::find(order.begin(), order.begin() + 7, exponents[i]) - order.begin());
    if (codes[i] == 7) put(escapes, exponents[i], 1);
  }
  Bytes block;
  put(block, 1, 1);
  for (std::size_t i = 0; i < 7; ++i) put(block, often[order[i]] > 0 ? order[i] : 0, 1);
  put(block, escapes.size(), 8);
  const auto append = [&](const Bytes& part) { block.insert(block.end(), part.begin(), part.end()); };
  const auto append_planes = [&](const std::vector<unsigned>& numbers) {
    for (unsigned bit = 0; bit < 3; ++bit) {
      for (std::size_t i = 0; i < padded; i += 8) {
        unsigned byte = 0;
        for (std::size_t k = 0; k < 8; ++k) byte |= (numbers[i + k] >> bit & 1) << k;
        put(block, byte, 1);
      }
    }
  };
  append(ranks);
  append(low);
  append(bytes);
  append_planes(codes);
  if (type == Scalar::f16) append_planes(low3);
  append(escapes);
  if (block.size() >= 16 + weights.size()) {
    block.assign(16, std::byte{0});
    append(weights);
  }
  block.resize((block.size() + 15) / 16 * 16);
  return block;
}

}  // namespace dynswap::test
