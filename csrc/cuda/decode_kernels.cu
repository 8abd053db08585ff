#include "cuda/decode_kernels.h"

#include <algorithm>

#include "cuda/decode_loop.h"

namespace dynswap {
namespace {

template <class To, class From>
__global__ void __launch_bounds__(kCastThreads) decode_kernel(To* __restrict__ dst, const Decoding from) {
  const unsigned lane_id = threadIdx.x % kLanes;
  const std::size_t warps = static_cast<std::size_t>(gridDim.x) * (kCastThreads / kLanes);
  std::size_t run =
      first_run(from) + static_cast<std::size_t>(blockIdx.x) * (kCastThreads / kLanes) + threadIdx.x / kLanes;
  for (const std::size_t last = last_run(from); run < last; run += warps) {
    DecodingLane<From> lane(from, run, lane_id);
    const std::uint32_t own = lane.escapes();
    std::uint32_t up_to_here = own;
    for (unsigned step = 1; step < kLanes; step *= 2) {
      const std::uint32_t below = __shfl_up_sync(0xFFFFFFFF, up_to_here, step);
      if (lane_id >= step) up_to_here += below;
    }
    lane.template store<To>(from, up_to_here - own, dst);
  }
}

template <class To>
cudaError_t launch_to(void* dst, const Decoding& from, Scalar stored, cudaStream_t stream) noexcept {
  const std::size_t runs = last_run(from) - first_run(from);
  const std::size_t warps = kCastThreads / kLanes;
  const auto blocks =
      static_cast<unsigned>(std::min<std::size_t>((runs + warps - 1) / warps, kMostCastBlocks));
  auto* const to = static_cast<To*>(dst);
  if (stored == Scalar::f32) {
    decode_kernel<To, float><<<blocks, kCastThreads, 0, stream>>>(to, from);
  } else if (stored == Scalar::f16) {
    decode_kernel<To, F16><<<blocks, kCastThreads, 0, stream>>>(to, from);
  } else {
    decode_kernel<To, BF16><<<blocks, kCastThreads, 0, stream>>>(to, from);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_decode(void* dst, Scalar dst_type, const CodedBlocks& from, Scalar stored,
                          std::size_t first, std::size_t count, cudaStream_t stream) noexcept {
  if (!lossless::codable(stored)) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  const Decoding decoding(from, stored, first, count);
  switch (dst_type) {
    case Scalar::f64:
      return launch_to<double>(dst, decoding, stored, stream);
    case Scalar::f32:
      return launch_to<float>(dst, decoding, stored, stream);
    case Scalar::f16:
      return launch_to<F16>(dst, decoding, stored, stream);
    case Scalar::bf16:
      return launch_to<BF16>(dst, decoding, stored, stream);
    case Scalar::f8_e5m2:
      return launch_to<F8E5M2>(dst, decoding, stored, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace dynswap
