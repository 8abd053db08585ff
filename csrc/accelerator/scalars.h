// The engine's element types in torch's terms.
#pragma once

#include <c10/core/ScalarType.h>

#include "core/scalar.h"

namespace dynswap {

/// torch's type for floating elements, and kByte for raw8. Throws Error for other types: their elements are
/// moved as raw8.
at::ScalarType torch_type(Scalar scalar);

}  // namespace dynswap
