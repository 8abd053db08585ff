// The lossless code of tensors, as Python calls it.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace dynswap {

void define_lossless(py::module_& m);

}  // namespace dynswap
