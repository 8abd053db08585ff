#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "lossless/code.h"
#include "lossless/load.h"

// GCC does not align the stack of Windows for vectors that it puts there.
#if defined(__x86_64__) && !defined(_WIN32)
#include <immintrin.h>
#define DYNSWAP_AVX2 1
#endif

namespace dynswap::lossless {
namespace {

/// A coded block, and tables of its exponents. An escape has 0 in both.
struct Coded {
  Coded(const std::byte* block, const Parts& where) noexcept : data(block), parts(where) {
    std::memcpy(by_code.data(), data + 1, kEscape);
    for (std::size_t pair = 0; pair < by_pair.size(); ++pair) {
      by_pair[pair] = std::uint32_t{by_code[pair % kCodes]} << 7 | std::uint32_t{by_code[pair / 16]} << 23;
    }
  }
  /// The bits of weights from `first` on, in each of the three planes that begin at `planes`.
  template <class T>
  std::array<T, 3> bits(std::size_t planes, std::size_t first) const noexcept {
    const std::byte* const at = data + planes + first / 8;
    return {load<T>(at), load<T>(at + parts.plane), load<T>(at + 2 * parts.plane)};
  }
  /// The bits of 64 weights, set for escapes.
  std::uint64_t escapes(std::size_t first) const noexcept {
    const auto planes = bits<std::uint64_t>(parts.planes, first);
    return planes[0] & planes[1] & planes[2];
  }

  const std::byte* data;
  Parts parts;
  alignas(16) std::array<std::uint8_t, 16> by_code{};
  std::array<std::uint32_t, 16 * kCodes> by_pair{};  ///< by two codes of 4 bits: two exponents, as in tops
};

/// By a byte: its bits, each the lowest of 4.
constexpr auto kNibbles = [] {
  std::array<std::uint32_t, 256> nibbles{};
  for (std::uint32_t byte = 0; byte < nibbles.size(); ++byte) {
    for (unsigned bit = 0; bit < 8; ++bit) nibbles[byte] |= (byte >> bit & 1) << 4 * bit;
  }
  return nibbles;
}();

/// The numbers of eight weights, each in 4 bits.
std::uint32_t eight_numbers(const std::array<std::uint8_t, 3>& planes) noexcept {
  return kNibbles[planes[0]] | kNibbles[planes[1]] << 1 | kNibbles[planes[2]] << 2;
}

/// Two numbers of 16 bits, each in 32.
std::uint64_t spread_pair(std::uint64_t two) noexcept { return (two & 0xFFFF) | (two >> 16 & 0xFFFF) << 32; }

/// Decodes a run but for the exponents of its escapes. `dst` need not be aligned.
template <Scalar kType>
void decode_run(const Coded& block, std::size_t first, std::byte* dst) noexcept {
  for (std::size_t i = first; i < first + kRunWeights; i += 8) {
    const std::uint32_t codes = eight_numbers(block.bits<std::uint8_t>(block.parts.planes, i));
    std::uint32_t low3 = 0;
    if constexpr (kType == Scalar::f16) {
      low3 = eight_numbers(block.bits<std::uint8_t>(block.parts.low_planes, i));
    }
#pragma GCC unroll 2
    for (std::size_t half = 0; half < 2; ++half, dst += 4 * scalar_size(kType)) {
      std::uint64_t tops = load<std::uint32_t>(block.data + block.parts.bytes + i + 4 * half);
      tops = (tops | tops << 16) & 0x0000FFFF0000FFFF;
      tops = (tops | tops << 8) & 0x00FF00FF00FF00FF;
      tops = (tops & 0x007F007F007F007F) | (tops & 0x0080008000800080) << 8;
      tops |= block.by_pair[codes >> 16 * half & 0xFF];
      tops |= std::uint64_t{block.by_pair[codes >> (16 * half + 8) & 0xFF]} << 32;
      if constexpr (kType == Scalar::f32) {
        const auto low = load<std::uint64_t>(block.data + block.parts.low + 2 * (i + 4 * half));
        store(dst, spread_pair(tops) << 16 | spread_pair(low));
        store(dst + 8, spread_pair(tops >> 32) << 16 | spread_pair(low >> 32));
      } else if constexpr (kType == Scalar::f16) {
        std::uint64_t low = low3 >> 16 * half & 0xFFFF;
        low = (low | low << 24) & 0x000000FF000000FF;
        low = (low | low << 12) & 0x000F000F000F000F;
        store(dst, (tops & 0x8000800080008000) | (tops & 0x1FFF1FFF1FFF1FFF) << 3 | low);
      } else {
        store(dst, tops);
      }
    }
  }
}

#ifdef DYNSWAP_AVX2
#define DYNSWAP_TARGET __attribute__((target("avx2")))

DYNSWAP_TARGET inline __m256i load_vector(const std::byte* src) noexcept {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}

/// The numbers of 32 weights.
DYNSWAP_TARGET inline __m256i numbers_of(const std::array<std::uint32_t, 3>& planes) noexcept {
  const __m256i byte_of_bit =
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i own_bit = _mm256_set1_epi64x(static_cast<std::int64_t>(0x8040201008040201));
  __m256i numbers = _mm256_setzero_si256();
#pragma GCC unroll 3
  for (std::size_t plane = 0; plane < 3; ++plane) {
    const __m256i bits = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(planes[plane])), byte_of_bit);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, own_bit), own_bit);
    numbers =
        _mm256_or_si256(numbers, _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(1 << plane))));
  }
  return numbers;
}

/// Stores the first halves of two vectors, and their second halves.
DYNSWAP_TARGET inline void store_halves(__m256i a, __m256i b, std::byte* dst) noexcept {
  auto* const to = reinterpret_cast<__m256i*>(dst);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(a, b, 0x20));
  _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(a, b, 0x31));
}

template <Scalar kType>
DYNSWAP_TARGET void decode_run_avx2(const Coded& block, std::size_t run, std::byte* dst) noexcept {
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(block.by_code.data())));
  for (std::size_t i = run; i < run + kRunWeights; i += 32, dst += 32 * scalar_size(kType)) {
    const __m256i codes = numbers_of(block.bits<std::uint32_t>(block.parts.planes, i));
    const __m256i exponents = _mm256_shuffle_epi8(table, codes);
    const __m256i bytes = load_vector(block.data + block.parts.bytes + i);
    const __m256i signs = _mm256_and_si256(bytes, _mm256_set1_epi8(static_cast<char>(0x80)));
    const __m256i mantissas = _mm256_add_epi8(bytes, bytes);
    // Unpacking works on halves of 16 weights: `first` has the first 8 of each. Exponents begin at bit 8.
    __m256i first = _mm256_unpacklo_epi8(mantissas, exponents);
    __m256i second = _mm256_unpackhi_epi8(mantissas, exponents);
    __m256i low = _mm256_setzero_si256();
    if constexpr (kType == Scalar::f16) {
      low = numbers_of(block.bits<std::uint32_t>(block.parts.low_planes, i));
      first = _mm256_slli_epi16(first, 2);
      second = _mm256_slli_epi16(second, 2);
    } else {
      first = _mm256_srli_epi16(first, 1);
      second = _mm256_srli_epi16(second, 1);
    }
    first = _mm256_or_si256(first, _mm256_unpacklo_epi8(low, signs));
    second = _mm256_or_si256(second, _mm256_unpackhi_epi8(low, signs));
    if constexpr (kType == Scalar::f32) {
      const __m256i tops[] = {_mm256_permute2x128_si256(first, second, 0x20),
                              _mm256_permute2x128_si256(first, second, 0x31)};
      for (std::size_t half = 0; half < 2; ++half) {
        const __m256i below = load_vector(block.data + block.parts.low + 2 * i + 32 * half);
        store_halves(_mm256_unpacklo_epi16(below, tops[half]), _mm256_unpackhi_epi16(below, tops[half]),
                     dst + 64 * half);
      }
    } else {
      store_halves(first, second, dst);
    }
  }
}
#endif

Kind kind_of(const std::byte* block) noexcept { return Kind{std::to_integer<std::uint8_t>(block[0])}; }
std::size_t escapes_of(const std::byte* block) noexcept { return load<std::uint16_t>(block + kEscapesAt); }

/// How many escapes are before a run.
std::size_t rank_of(const std::byte* block, std::size_t run, std::size_t escapes) noexcept {
  return run == kRuns ? escapes : load<std::uint16_t>(block + kHeaderBytes + run * sizeof(std::uint16_t));
}

/// What is wrong with the kind or the length of a block; null if all its parts are there.
const char* check_length(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights) noexcept {
  if (!codable(type)) return "weights of this type are not coded";
  if (weights == 0 || weights > kBlockWeights) return "a block has 1 to 4096 weights";
  if (bytes < kHeaderBytes) return "it is shorter than a header";
  if (kind_of(src) == Kind::raw) {
    return bytes == raw_block_bytes(type, weights) ? nullptr : "it has another length than its weights";
  }
  if (kind_of(src) != Kind::coded) return "its kind is not known";
  if (bytes != align_up(parts_of(type, weights).escapes + escapes_of(src), kAlignment)) {
    return "it has another length than its weights and escapes";
  }
  return nullptr;
}

template <Scalar kType>
bool decode(const Coded& block, std::size_t escapes, std::size_t first, std::size_t count, std::byte* dst,
            [[maybe_unused]] Instructions instructions) noexcept {
  using Bits = std::conditional_t<kType == Scalar::f32, std::uint32_t, std::uint16_t>;
  constexpr int kExponentBit = kType == Scalar::f32 ? 23 : kType == Scalar::f16 ? 10 : 7;
  auto* whole_run = &decode_run<kType>;
#ifdef DYNSWAP_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2 && instructions == Instructions::best) whole_run = &decode_run_avx2<kType>;
#endif
  for (const std::size_t end = first + count; first < end;) {
    const std::size_t skipped = first % kRunWeights;
    const std::size_t run = first - skipped;
    const std::size_t taken = std::min(kRunWeights - skipped, end - first);
    std::array<std::byte, kRunWeights * sizeof(Bits)> all;
    std::byte* const to = taken == kRunWeights ? dst : all.data();
    whole_run(block, run, to);
    std::size_t escape = rank_of(block.data, run / kRunWeights, escapes);
    const std::size_t next = rank_of(block.data, run / kRunWeights + 1, escapes);
    if (run == 0 && escape != 0) return false;
    for (std::size_t at = 0; at < kRunWeights; at += 64) {
      for (std::uint64_t left = block.escapes(run + at); left != 0; left &= left - 1, ++escape) {
        if (escape >= next || next > escapes) return false;
        std::byte* const weight = to + sizeof(Bits) * (at + static_cast<std::size_t>(std::countr_zero(left)));
        const auto exponent = std::to_integer<std::uint32_t>(block.data[block.parts.escapes + escape]);
        store(weight, static_cast<Bits>(load<Bits>(weight) | exponent << kExponentBit));
      }
    }
    if (escape != next) return false;
    if (to != dst) std::memcpy(dst, to + skipped * sizeof(Bits), taken * sizeof(Bits));
    dst += taken * sizeof(Bits);
    first += taken;
  }
  return true;
}

}  // namespace

const char* check_block(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights) noexcept {
  if (const char* const wrong = check_length(type, src, bytes, weights)) return wrong;
  if (kind_of(src) == Kind::raw) return nullptr;
  const std::size_t escapes = escapes_of(src);
  if (rank_of(src, 0, escapes) != 0) return "its first run does not begin with the first escape";
  for (std::size_t run = 0; run < kRuns; ++run) {
    if (rank_of(src, run, escapes) > rank_of(src, run + 1, escapes)) {
      return "its escapes before runs do not rise to their number";
    }
  }
  return nullptr;
}

bool decode_block(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights,
                  std::size_t first, std::size_t count, void* dst, Instructions instructions) noexcept {
  if (check_length(type, src, bytes, weights) != nullptr) return false;
  if (first > weights || count > weights - first) return false;
  if (count == 0) return true;
  auto* const out = static_cast<std::byte*>(dst);
  if (kind_of(src) == Kind::raw) {
    std::memcpy(out, src + kHeaderBytes + first * scalar_size(type), count * scalar_size(type));
    return true;
  }
  const Parts parts = parts_of(type, weights);
#ifdef __GNUC__
  // The planes are too short for the processor to prefetch them: from memory it is a fifth faster.
  for (std::size_t at = parts.planes; at < bytes; at += 64) __builtin_prefetch(src + at);
#endif
  const Coded block(src, parts);
  return with_type(type, [&](auto constant) {
    return decode<constant.value>(block, escapes_of(src), first, count, out, instructions);
  });
}

}  // namespace dynswap::lossless
