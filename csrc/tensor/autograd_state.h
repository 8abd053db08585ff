// What torch's autograd keeps of a tensor behind a mutex of that tensor.
//
// Note [Autograd's mutex is taken without the GIL]
// From torch 2.13 on, a tensor's first owner in C++ beside its Python object takes the GIL, to keep that
// object. torch makes a leaf's AccumulateGrad under the leaf's mutex and is its owner then: a thread that
// runs an operation on a master (a penalty on `model.parameters()`) waits for the GIL with the mutex. So
// whoever waits for the mutex may not have the GIL, or the two wait for each other for good.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace dynswap {

/// Where the gradient of a tensor goes. May let other threads have the GIL.
torch::autograd::Edge gradient_edge_of(const at::Tensor& tensor);

/// Whether some tensors may have tangents: a level of forward-mode differentiation is open. Quick.
bool may_have_tangents();

/// Whether the tensor has a tangent. Lets other threads have the GIL.
bool has_tangent(const at::Tensor& tensor);

}  // namespace dynswap
