// The autograd node between a handed-out tensor and its master.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace dynswap {

/// Takes the gradient of what was handed out to the master's device and dtype (Invariant 7). The same as
/// the backward of `master.to(device, dtype)`, and differentiable like it.
class FetchBackward : public torch::autograd::Node {
 public:
  explicit FetchBackward(const at::Tensor& master);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "DynswapFetchBackward"; }

  /// Makes `handed_out` (no history, not a leaf yet) the result of fetching `master`.
  static void connect(const at::Tensor& handed_out, const at::Tensor& master);

 private:
  at::TensorOptions master_;
};

}  // namespace dynswap
