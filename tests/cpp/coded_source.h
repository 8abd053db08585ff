// Sources whose weights are coded, and their plain twins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "core/source.h"
#include "io/file.h"
#include "lossless_weights.h"
#include "temp_file.h"

namespace dynswap::test {

/// A tensor's weights, plain and coded.
struct CodedWeights {
  CodedWeights(Scalar stored, Bytes weights)
      : type(stored), plain(std::move(weights)), coded(encoded_tensor(stored, plain)) {
    auto made = std::make_shared<Coding>();
    made->block_weights = lossless::kBlockWeights;
    made->weights = plain.size() / scalar_size(type);
    for (std::size_t i = 0; i <= lossless::blocks_of(made->weights); ++i)
      made->blocks.push_back(get(coded, 8 * i, 8));
    coding = std::move(made);
  }

  std::uint64_t count() const { return coding->weights; }

  /// All of them, in RAM.
  std::shared_ptr<Source> source(Scalar wanted) const {
    auto made = std::make_shared<Source>();
    made->name = "coded.weight";
    made->stored = type;
    made->wanted = wanted;
    made->count = count();
    made->address = coded.data();
    made->coding = coding;
    return made;
  }
  /// The same, in a file from `offset` on.
  std::shared_ptr<Source> source(Scalar wanted, const TempFile& file, std::uint64_t offset) const {
    auto made = source(wanted);
    made->address = nullptr;
    made->file = File::open(file.path());
    made->offset = offset;
    return made;
  }

  Scalar type;
  Bytes plain;
  Bytes coded;
  std::shared_ptr<const Coding> coding;
};

/// Weights as layers have them, and between them blocks that are coded raw.
inline CodedWeights some_weights(Scalar type, std::size_t count, std::uint64_t seed) {
  Random random(seed);
  Bytes all;
  const std::size_t size = scalar_size(type);
  while (all.size() < count * size) {
    const std::size_t length = random.between(1, 3) * lossless::kBlockWeights;
    const Bytes more =
        random.chance(0.7) ? trained(type, length, random.next()) : noise(type, length, random.next());
    all.insert(all.end(), more.begin(), more.end());
  }
  all.resize(count * size);
  return {type, std::move(all)};
}

/// Stands in for a cast: some function of each element, whatever the types are.
inline void mix(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count) {
  const std::size_t to = scalar_size(dst_type), from = scalar_size(src_type);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t k = 0; k < to; ++k) {
      const std::byte in = static_cast<const std::byte*>(src)[i * from + k % from];
      static_cast<std::byte*>(dst)[i * to + k] = in ^ static_cast<std::byte>(k);
    }
  }
}

/// Elements [first, first + count) as they have to arrive, by `cast` if the types differ.
inline Bytes right(const CodedWeights& weights, Scalar wanted, std::uint64_t first, std::uint64_t count,
                   CastFn cast = mix) {
  const std::byte* const plain = weights.plain.data() + first * scalar_size(weights.type);
  Bytes bytes(count * scalar_size(wanted));
  if (wanted == weights.type)
    std::copy_n(plain, bytes.size(), bytes.begin());
  else
    cast(bytes.data(), wanted, plain, weights.type, count);
  return bytes;
}

/// Writes over bytes of a file.
inline void write_at(const std::string& path, std::uint64_t offset, const Bytes& bytes) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(offset));
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace dynswap::test
