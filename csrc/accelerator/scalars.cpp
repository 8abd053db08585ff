#include "accelerator/scalars.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "accelerator/plain_torch.h"
#include "core/check.h"

namespace dynswap {

at::ScalarType torch_type(Scalar scalar) {
  switch (scalar) {
    case Scalar::f64:
      return at::kDouble;
    case Scalar::f32:
      return at::kFloat;
    case Scalar::f16:
      return at::kHalf;
    case Scalar::bf16:
      return at::kBFloat16;
    case Scalar::f8_e4m3fn:
      return at::kFloat8_e4m3fn;
    case Scalar::f8_e5m2:
      return at::kFloat8_e5m2;
    case Scalar::raw8:
      return at::kByte;
    default:
      throw Error("integers are moved, never cast");
  }
}

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

}  // namespace dynswap
