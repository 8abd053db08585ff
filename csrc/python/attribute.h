// The attribute path: the descriptor on a swap class.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace dynswap {

/// Adds the type `Attribute`.
void define_attribute(py::module_& m);

}  // namespace dynswap
