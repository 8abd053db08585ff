#include "bindings/glue.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>

#include "accelerator/device_runtime.h"
#include "accelerator/giving_way.h"
#include "accelerator/plain_torch.h"
#include "accelerator/scalars.h"
#include "core/amount.h"
#include "core/check.h"

namespace dynswap {

std::optional<Scalar> scalar_of(at::ScalarType type) noexcept {
  switch (type) {
    case at::kDouble:
      return Scalar::f64;
    case at::kFloat:
      return Scalar::f32;
    case at::kHalf:
      return Scalar::f16;
    case at::kBFloat16:
      return Scalar::bf16;
    case at::kFloat8_e4m3fn:
      return Scalar::f8_e4m3fn;
    case at::kFloat8_e5m2:
      return Scalar::f8_e5m2;
    default:
      break;
  }
  if (at::isQIntType(type) || at::isBitsType(type)) return std::nullopt;
  switch (c10::elementSize(type)) {
    case 1:
      return Scalar::raw8;
    case 2:
      return Scalar::raw16;
    case 4:
      return Scalar::raw32;
    case 8:
      return Scalar::raw64;
    case 16:
      return Scalar::raw128;
    default:
      return std::nullopt;
  }
}

bool can_move(at::ScalarType stored, at::ScalarType wanted) noexcept {
  const auto from = scalar_of(stored);
  const auto to = scalar_of(wanted);
  return from && to && (stored == wanted || (is_floating(*from) && is_floating(*to)));
}

void cast_elements(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count) {
  // Below torch's grain size, so that its conversion stays on this thread.
  constexpr std::size_t kRun = at::internal::GRAIN_SIZE;
  const PlainTorch plain;  // it may run on a thread of the user's
  for (std::size_t done = 0; done < count; done += kRun) {
    const auto run = static_cast<std::int64_t>(std::min(kRun, count - done));
    at::Tensor to = at::from_blob(static_cast<std::byte*>(dst) + done * scalar_size(dst_type), {run},
                                  at::TensorOptions().dtype(torch_type(dst_type)));
    const at::Tensor from = at::from_blob(
        const_cast<std::byte*>(static_cast<const std::byte*>(src)) + done * scalar_size(src_type), {run},
        at::TensorOptions().dtype(torch_type(src_type)));
    to.copy_(from);
  }
}

Stream handle_of(const c10::Stream& stream) { return static_cast<Stream>(stream.id()); }

Stream native_handle(const at::Device& device, Stream stream) {
  const c10::Stream known(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(stream));
  return reinterpret_cast<Stream>(known.native_handle());
}

Stream current_stream(const at::Device& device) {
  return device.is_cpu() ? 0 : handle_of(torch_stream(device));
}

c10::Stream torch_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

bool capturing(const at::Device& device) { return !device.is_cpu() && is_captured(torch_stream(device)); }

void refuse_capture_of_written(const at::Device& device, const std::string& buffer) {
  if (!capturing(device)) return;
  throw DeviceError("'" + buffer +
                    "' is a buffer that its module may write while it trains, so it is looked at after each "
                    "call, which cannot be captured in a CUDA graph; call eval() on the module before the "
                    "capture, or capture without an install");
}

void refuse_capture(const at::Device& device, const std::string& weight, bool resident) {
  if (!capturing(device)) return;
  if (resident) {
    throw DeviceError(
        "'" + weight +
        "' is not on the device yet, and cannot be brought there while a CUDA graph is captured; "
        "run the model once before the capture");
  }
  throw DeviceError(
      "'" + weight +
      "' is streamed, so other weights use its memory too, and it cannot be read while a CUDA graph "
      "is captured; capture with a budget that keeps it resident, or without an install");
}

Memory allocate_through_torch(const at::Device& device, std::size_t bytes) {
  const PlainTorch guard;  // memory of our own: no transform, mode or graph of the user's has a part in it
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  while (true) try {
      auto block = std::make_shared<at::Tensor>(at::empty({static_cast<std::int64_t>(bytes)}, options));
      auto* data = static_cast<std::byte*>(block->data_ptr());
      return Memory(std::move(block), data);
    } catch (const c10::OutOfMemoryError& error) {
      if (give_way(device)) continue;
      throw OutOfMemory("no room for " + amount(bytes) + " of weights on " + device.str() +
                        "; pass a smaller budget. " + error.what_without_backtrace());
    }
}

}  // namespace dynswap
