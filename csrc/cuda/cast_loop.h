// What the threads of a cast kernel do, and how many there are: the same code on the host, where tests run it
// thread by thread, and on the device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/convert.h"

namespace dynswap {

constexpr unsigned kCastThreads = 256;  ///< of a block
// Enough to keep the memory busy; few enough to leave room beside the model's own kernels.
constexpr std::size_t kMostCastBlocks = 1024;

/// Elements that one thread loads and stores at a time: 16 bytes of the larger type.
template <class To, class From>
constexpr int kCastRun = 16 / static_cast<int>(sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) CastRun {
  Element elements[kCount];
};

/// How many blocks of threads a cast kernel is launched with, and how much of the work is whole runs.
struct CastShape {
  std::size_t runs;  ///< whole runs; the elements after them are cast one by one
  unsigned blocks;
};

template <class To, class From>
CastShape cast_shape(const void* dst, const void* src, std::size_t count) noexcept {
  constexpr std::size_t kCount = kCastRun<To, From>;
  const auto aligned = [](const void* address, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  };
  const bool whole = aligned(dst, sizeof(To) * kCount) && aligned(src, sizeof(From) * kCount);
  const std::size_t runs = whole ? count / kCount : 0;
  const std::size_t work = std::max(runs, count - runs * kCount);
  const std::size_t blocks = (work + kCastThreads - 1) / kCastThreads;
  return {runs, static_cast<unsigned>(std::clamp<std::size_t>(blocks, 1, kMostCastBlocks))};
}

/// The part of thread `first` of `stride`: `runs` whole runs, which src and dst are aligned for, then
/// `count - runs * kCastRun` single elements.
template <class To, class From>
DYNSWAP_BOTH void cast_loop(To* __restrict__ dst, const From* __restrict__ src, std::size_t count,
                            std::size_t runs, std::size_t first, std::size_t stride) {
  constexpr int kCount = kCastRun<To, From>;
  for (std::size_t i = first; i < runs; i += stride) {
    const auto in = reinterpret_cast<const CastRun<From, kCount>*>(src)[i];
    CastRun<To, kCount> out;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int k = 0; k < kCount; ++k) out.elements[k] = convert<To>(in.elements[k]);
    reinterpret_cast<CastRun<To, kCount>*>(dst)[i] = out;
  }
  for (std::size_t i = runs * kCount + first; i < count; i += stride) dst[i] = convert<To>(src[i]);
}

}  // namespace dynswap
