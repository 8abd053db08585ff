#include "cuda/cast_kernels.h"
#include "cuda/cast_loop.h"

namespace dynswap {
namespace {

template <class To, class From>
__global__ void __launch_bounds__(kCastThreads)
    cast_kernel(To* __restrict__ dst, const From* __restrict__ src, std::size_t count, std::size_t runs) {
  const std::size_t first = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  cast_loop(dst, src, count, runs, first, static_cast<std::size_t>(gridDim.x) * blockDim.x);
}

template <class To, class From>
cudaError_t launch(void* dst, const void* src, std::size_t count, cudaStream_t stream) noexcept {
  const CastShape shape = cast_shape<To, From>(dst, src, count);
  cast_kernel<To, From><<<shape.blocks, kCastThreads, 0, stream>>>(
      static_cast<To*>(dst), static_cast<const From*>(src), count, shape.runs);
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
