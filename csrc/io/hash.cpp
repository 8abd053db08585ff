#include "io/hash.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dynswap {

namespace {

constexpr std::uint64_t kLow = 0x9e3779b8;  // both even, so that each step of mix() can be undone
constexpr std::uint64_t kHigh = 0x85ebca6c;

/// Each half is multiplied into the whole. Two words give different results with one hash, and two hashes
/// with one word. After only one multiplication, the sign of the upper of two floats would change just one
/// bit, which the sign of another float can change back.
std::uint64_t mix(std::uint64_t hash, std::uint64_t word) noexcept {
  hash ^= word;
  hash += static_cast<std::uint32_t>(hash) * kLow;
  hash = hash >> 32 | hash << 32;
  return hash + static_cast<std::uint32_t>(hash) * kHigh;
}

#if defined(__x86_64__)

constexpr std::size_t kVectors = 8;  ///< as many as hide how long a multiplication takes
constexpr std::size_t kBlock = kVectors * sizeof(__m256i);
using Digest = std::array<std::byte, kBlock>;

/// Runs mix() over the lanes of some vectors. `bytes` is a multiple of kBlock.
__attribute__((target("avx2"))) Digest digest_of(const std::byte* data, std::size_t bytes) noexcept {
  constexpr int kOtherHalf = 0xb1;
  const __m256i low = _mm256_set1_epi64x(kLow);
  const __m256i high = _mm256_set1_epi64x(kHigh);
  __m256i state[kVectors];
  std::int64_t lane = 0;
  for (__m256i& vector : state) vector = _mm256_set1_epi64x(++lane);
  for (const std::byte* const end = data + bytes; data != end; data += kBlock) {
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kVectors; ++i) {
      const auto* const words = reinterpret_cast<const __m256i*>(data) + i;
      __m256i hash = _mm256_xor_si256(state[i], _mm256_loadu_si256(words));
      hash = _mm256_add_epi64(hash, _mm256_mul_epu32(hash, low));
      hash = _mm256_shuffle_epi32(hash, kOtherHalf);
      state[i] = _mm256_add_epi64(hash, _mm256_mul_epu32(hash, high));
    }
  }
  Digest digest;
  std::memcpy(digest.data(), state, sizeof(state));
  return digest;
}

bool has_wide_vectors() noexcept {
  static const bool known = __builtin_cpu_supports("avx2") != 0;
  return known;
}

#endif

}  // namespace

void Hash::add(const std::byte* data, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  if (bytes >= 2 * kBlock && has_wide_vectors()) {
    const std::size_t whole = bytes / kBlock * kBlock;
    const Digest digest = digest_of(data, whole);
    add(digest.data(), digest.size());
    data += whole;
    bytes -= whole;
  }
#endif
  for (; bytes >= sizeof(lanes_); data += sizeof(lanes_), bytes -= sizeof(lanes_)) {
    decltype(lanes_) words;
    std::memcpy(words.data(), data, sizeof(words));
    for (std::size_t i = 0; i < words.size(); ++i) lanes_[i] = mix(lanes_[i], words[i]);
  }
  for (std::size_t lane = 0; bytes > 0; ++lane) {
    std::uint64_t word = 0;
    const std::size_t length = std::min(bytes, sizeof(word));
    std::memcpy(&word, data, length);
    lanes_[lane] = mix(lanes_[lane], word);
    data += length;
    bytes -= length;
  }
}

std::uint64_t Hash::value() const noexcept {
  std::uint64_t value = 0;
  for (const std::uint64_t lane : lanes_) value = mix(value, lane);
  return value;
}

}  // namespace dynswap
