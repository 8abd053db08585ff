#include "accelerator/scalars.h"

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

}  // namespace dynswap
