#include "tensor/autograd_state.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/variable.h>

#include "tensor/interpreter.h"

namespace dynswap {

torch::autograd::Edge gradient_edge_of(const at::Tensor& tensor) {
  const at::Tensor held = tensor;
  // There is no other owner in C++. Nobody is about to become the first one, with the mutex, nor will be. (A
  // node that is made while anomalies are detected wants the GIL in any case.)
  if (held.use_count() == 2 && !torch::autograd::AnomalyMode::is_enabled())
    return torch::autograd::impl::gradient_edge(tensor);
  const WithoutGil released;
  return torch::autograd::impl::gradient_edge(tensor);
}

bool may_have_tangents() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

bool has_tangent(const at::Tensor& tensor) {
  const WithoutGil released;
  return tensor._fw_grad(0).defined();
}

}  // namespace dynswap
