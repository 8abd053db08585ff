// The engine's element types in torch's terms.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>

#include "core/scalar.h"

namespace dynswap {

/// torch's type for floating elements, and kByte for raw8. Throws Error for other types: their elements are
/// moved as raw8.
at::ScalarType torch_type(Scalar scalar);

/// The engine's element type, or nothing if it cannot move such elements (quantised, sub-byte).
std::optional<Scalar> scalar_of(at::ScalarType type) noexcept;

/// Whether the engine can move such elements, and cast them where the two differ. It cannot cast all of
/// torch's floating types (float8_e4m3fnuz and others are raw8 to it): torch converts those masters.
bool can_move(at::ScalarType stored, at::ScalarType wanted) noexcept;

/// torch's own conversion, so that what is streamed equals `.to(dtype)` to the bit. A CastFn.
void cast_elements(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count);

}  // namespace dynswap
