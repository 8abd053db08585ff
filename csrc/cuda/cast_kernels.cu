#include <algorithm>
#include <cstdint>

#include "cuda/cast_kernels.h"
#include "cuda/convert.h"

namespace dynswap {
namespace {

constexpr unsigned kThreads = 256;
// Enough to keep the memory busy; few enough to leave room beside the model's own kernels.
constexpr std::size_t kMostBlocks = 1024;

/// Elements that one thread loads and stores at a time: 16 bytes of the larger type.
template <class To, class From>
constexpr int kRun = 16 / static_cast<int>(sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Run {
  Element elements[kCount];
};

/// `runs` whole runs, which src and dst are aligned for, then `count - runs * kRun` single elements.
template <class To, class From>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(To* __restrict__ dst, const From* __restrict__ src, std::size_t count, std::size_t runs) {
  constexpr int kCount = kRun<To, From>;
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * kThreads;
  const std::size_t first = static_cast<std::size_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (std::size_t i = first; i < runs; i += stride) {
    const auto in = reinterpret_cast<const Run<From, kCount>*>(src)[i];
    Run<To, kCount> out;
#pragma unroll
    for (int k = 0; k < kCount; ++k) out.elements[k] = convert<To>(in.elements[k]);
    reinterpret_cast<Run<To, kCount>*>(dst)[i] = out;
  }
  for (std::size_t i = runs * kCount + first; i < count; i += stride) dst[i] = convert<To>(src[i]);
}

template <class To, class From>
cudaError_t launch(void* dst, const void* src, std::size_t count, cudaStream_t stream) noexcept {
  constexpr std::size_t kCount = kRun<To, From>;
  const auto aligned = [](const void* address, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  };
  const bool whole = aligned(dst, sizeof(To) * kCount) && aligned(src, sizeof(From) * kCount);
  const std::size_t runs = whole ? count / kCount : 0;
  const std::size_t work = std::max(runs, count - runs * kCount);
  const std::size_t blocks = std::clamp<std::size_t>((work + kThreads - 1) / kThreads, 1, kMostBlocks);
  cast_kernel<To, From><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<To*>(dst), static_cast<const From*>(src), count, runs);
  return cudaGetLastError();
}

template <class To>
cudaError_t launch_to(void* dst, const void* src, Scalar src_type, std::size_t count,
                      cudaStream_t stream) noexcept {
  switch (src_type) {
    case Scalar::f64:
      return launch<To, double>(dst, src, count, stream);
    case Scalar::f32:
      return launch<To, float>(dst, src, count, stream);
    case Scalar::f16:
      return launch<To, F16>(dst, src, count, stream);
    case Scalar::bf16:
      return launch<To, BF16>(dst, src, count, stream);
    case Scalar::f8_e4m3fn:
      return launch<To, F8E4M3FN>(dst, src, count, stream);
    case Scalar::f8_e5m2:
      return launch<To, F8E5M2>(dst, src, count, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t kernels_for_this_device() noexcept {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&cast_kernel<BF16, float>));
}

cudaError_t launch_cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count,
                        cudaStream_t stream) noexcept {
  switch (dst_type) {
    case Scalar::f64:
      return launch_to<double>(dst, src, src_type, count, stream);
    case Scalar::f32:
      return launch_to<float>(dst, src, src_type, count, stream);
    case Scalar::f16:
      return launch_to<F16>(dst, src, src_type, count, stream);
    case Scalar::bf16:
      return launch_to<BF16>(dst, src, src_type, count, stream);
    case Scalar::f8_e5m2:
      return launch_to<F8E5M2>(dst, src, src_type, count, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace dynswap
