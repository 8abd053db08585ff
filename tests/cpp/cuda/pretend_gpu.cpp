#include "pretend_gpu.h"

#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "cuda/cast_kernels.h"
#include "cuda/convert.h"
#include "cuda/decode_kernels.h"
#include "cuda/decode_loop.h"
#include "transfer/copy_plan.h"

namespace dynswap::gpu {
namespace {

pretend::Stream& stream_of(cudaStream_t stream) { return *reinterpret_cast<pretend::Stream*>(stream); }

template <class To, class From>
void cast_run(void* dst, const void* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    From in;
    std::memcpy(&in, static_cast<const std::byte*>(src) + i * sizeof(From), sizeof(From));
    To out;
    if constexpr (std::is_same_v<To, F8E4M3FN>) {
      out.bits = static_cast<std::uint8_t>(__builtin_bit_cast(std::uint32_t, to_float(in)) >> 24);
    } else {
      out = convert<To>(in);
    }
    std::memcpy(static_cast<std::byte*>(dst) + i * sizeof(To), &out, sizeof(To));
  }
}

/// Calls `use` with a value of the type.
template <class Use>
void with(Scalar type, const Use& use) {
  switch (type) {
    case Scalar::f64:
      return use(double{});
    case Scalar::f32:
      return use(float{});
    case Scalar::f16:
      return use(F16{});
    case Scalar::bf16:
      return use(BF16{});
    case Scalar::f8_e4m3fn:
      return use(F8E4M3FN{});
    case Scalar::f8_e5m2:
      return use(F8E5M2{});
    default:
      pretend::violate("a cast of what is not floating");
  }
}

}  // namespace

void reset(std::uint64_t seed, pretend::Order order) { pretend::reset(seed, order); }

bool is_locked(const void* address, std::size_t bytes) {
  auto at = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t end = at + bytes;
  while (at < end) {
    const auto [begin, length] = pretend::pinned_range(reinterpret_cast<const void*>(at));
    if (length == 0) return false;
    at = begin + length;
  }
  return true;
}

cudaStream_t make_stream() { return reinterpret_cast<cudaStream_t>(&pretend::make_stream(0, 0)); }
void destroy_stream(cudaStream_t stream) {
  finish(stream);  // its work may refer to what goes next
  pretend::destroy(stream_of(stream));
}
void enqueue(cudaStream_t stream, std::function<void()> work) {
  pretend::enqueue(stream_of(stream), std::move(work), "the test's work");
}
void finish(cudaStream_t stream) { pretend::synchronise(stream_of(stream), "the test"); }
void capture(cudaStream_t stream, bool captured) {
  if (captured)
    pretend::begin_capture(stream_of(stream), /*global=*/true);
  else
    pretend::end_capture(stream_of(stream));
}
void delay(cudaStream_t stream, std::chrono::nanoseconds length) {
  pretend::enqueue_delay(stream_of(stream), length);
}

Memory allocate(std::size_t bytes) {
  void* const address = pretend::reserve(0, bytes);
  if (address == nullptr) throw std::runtime_error("no device addresses are left");
  return Memory(static_cast<std::byte*>(address), [bytes](std::byte* of) { pretend::release(0, of, bytes); });
}

std::byte* bytes_at(const void* address) { return pretend::hidden(address); }

std::vector<std::byte> Block::bytes() const {
  const std::byte* begin = bytes_at(memory_.get());
  return {begin, begin + bytes_};
}

bool Block::operator==(const std::vector<std::byte>& other) const { return bytes() == other; }

bool Block::at_rest() const {
  const std::vector<std::byte> before = bytes();
  pretend::synchronise_device(0, "the test");
  return bytes() == before;
}

void cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count) {
  with(dst_type,
       [&]<class To>(To) { with(src_type, [&]<class From>(From) { cast_run<To, From>(dst, src, count); }); });
}

}  // namespace dynswap::gpu

namespace dynswap {

cudaError_t kernels_for_this_device() noexcept {
  return static_cast<cudaError_t>(pretend::faults().kernel_error);
}

cudaError_t launch_cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count,
                        cudaStream_t stream) noexcept {
  if (!device_casts_to(dst_type)) pretend::violate("a cast that the device does not know");
  pretend::count(&pretend::Counts::kernels);
  gpu::enqueue(stream,
               [=] { gpu::cast(pretend::hidden(dst), dst_type, pretend::hidden(src), src_type, count); });
  return cudaSuccess;
}

cudaError_t launch_decode(void* dst, Scalar dst_type, const CodedBlocks& from, Scalar stored,
                          std::size_t first, std::size_t count, cudaStream_t stream) noexcept {
  if (!device_casts_to(dst_type)) pretend::violate("a decoding to what the device does not know");
  if (count == 0) return cudaSuccess;
  pretend::count(&pretend::Counts::kernels);
  gpu::enqueue(stream, [=] {
    const auto* const index = reinterpret_cast<const std::uint64_t*>(pretend::hidden(from.index));
    const Decoding decoding({pretend::hidden(from.coded), index, from.blocks, from.weights}, stored, first,
                            count);
    gpu::with(dst_type, [&]<class To>(To) {
      if constexpr (!std::is_same_v<To, F8E4M3FN>) {
        auto* const to = reinterpret_cast<To*>(pretend::hidden(dst));
        if (stored == Scalar::f32) decode_on_host<To, float>(to, decoding, 0, 1);
        if (stored == Scalar::f16) decode_on_host<To, F16>(to, decoding, 0, 1);
        if (stored == Scalar::bf16) decode_on_host<To, BF16>(to, decoding, 0, 1);
      }
    });
  });
  return cudaSuccess;
}

}  // namespace dynswap
