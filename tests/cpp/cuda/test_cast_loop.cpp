// The loop of the cast kernels, thread by thread, against the host's own conversions.
#include "cuda/cast_loop.h"

#include <cstddef>
#include <vector>

#include "check.h"
#include "pretend_gpu.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using dynswap::test::random_bytes;

constexpr std::byte kUntouched{0xA5};
constexpr std::size_t kBeyond = 16;  ///< elements that no thread may write

/// A cast of `count` elements by some thousand threads or by few, between memory that lies `to_at` and
/// `from_at` elements behind an aligned address.
template <class To, class From>
void check_cast(Scalar to, Scalar from, std::size_t count, std::size_t to_at, std::size_t from_at) {
  const std::vector<std::byte> source =
      random_bytes((from_at + count + kBeyond) * sizeof(From), count + from_at);
  const std::byte* const src = source.data() + from_at * sizeof(From);
  std::vector<std::byte> expected((to_at + count + kBeyond) * sizeof(To), kUntouched);
  gpu::cast(expected.data() + to_at * sizeof(To), to, src, from, count);

  std::vector<std::byte> target(expected.size());
  std::byte* const dst = target.data() + to_at * sizeof(To);
  const CastShape shape = cast_shape<To, From>(dst, src, count);
  EXPECT(shape.blocks >= 1 && shape.blocks <= kMostCastBlocks);
  if (to_at == 0 && from_at == 0) EXPECT(shape.runs == count / kCastRun<To, From>);
  for (const std::size_t threads :
       {std::size_t{shape.blocks} * kCastThreads, std::size_t{3}, std::size_t{1}}) {
    target.assign(target.size(), kUntouched);
    for (std::size_t thread = 0; thread < threads; ++thread) {
      cast_loop(reinterpret_cast<To*>(dst), reinterpret_cast<const From*>(src), count, shape.runs, thread,
                threads);
    }
    EXPECT(target == expected);
  }
}

template <class To, class From>
void check_pair(Scalar to, Scalar from) {
  if (to == from) return;  // a copy: no kernel is launched
  for (const std::size_t count : {0, 1, 2, 7, 15, 16, 17, 255, 257, 5000}) {
    check_cast<To, From>(to, from, count, 0, 0);
    check_cast<To, From>(to, from, count, 1, 0);
    check_cast<To, From>(to, from, count, 0, 3);
  }
}

template <class To>
void check_casts_to(Scalar to) {
  check_pair<To, double>(to, Scalar::f64);
  check_pair<To, float>(to, Scalar::f32);
  check_pair<To, F16>(to, Scalar::f16);
  check_pair<To, BF16>(to, Scalar::bf16);
  check_pair<To, F8E4M3FN>(to, Scalar::f8_e4m3fn);
  check_pair<To, F8E5M2>(to, Scalar::f8_e5m2);
}

TEST(the_threads_of_a_cast_to_f64_write_all_and_nothing_else) { check_casts_to<double>(Scalar::f64); }
TEST(the_threads_of_a_cast_to_f32_write_all_and_nothing_else) { check_casts_to<float>(Scalar::f32); }
TEST(the_threads_of_a_cast_to_f16_write_all_and_nothing_else) { check_casts_to<F16>(Scalar::f16); }
TEST(the_threads_of_a_cast_to_bf16_write_all_and_nothing_else) { check_casts_to<BF16>(Scalar::bf16); }
TEST(the_threads_of_a_cast_to_f8_e5m2_write_all_and_nothing_else) { check_casts_to<F8E5M2>(Scalar::f8_e5m2); }

TEST(a_cast_that_is_larger_than_all_threads_goes_round) {
  check_cast<float, double>(Scalar::f32, Scalar::f64, kMostCastBlocks * kCastThreads * 2 + 5, 0, 0);
  check_cast<float, double>(Scalar::f32, Scalar::f64, kMostCastBlocks * kCastThreads * 2 + 5, 1, 0);
}

}  // namespace
