// The autograd nodes between a handed-out tensor and its master.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>

#include "io/memory_watch.h"

namespace dynswap {

/// The node that a weight's handed-out tensors are the result of, for as long as some graph has it.
///
/// Note [Uses of a weight share a node]
/// A streamed weight that is used twice in a pass is handed out twice, as two tensors. Were each the result
/// of a node of its own, the gradient of each would be rounded to the master's dtype by itself, and the two
/// added there. Without an install they meet in the parameter's AccumulateGrad, and are added where and in
/// what the model computes. So all of a weight's tensors are the result of one node.
class GradientNode {
 public:
  using Pointer = decltype(torch::autograd::Edge::function);

  /// The node, if it would be made the same way now; else null.
  Pointer get(const at::Tensor& handed_out, const torch::autograd::Edge& to,
              const std::shared_ptr<MemoryWatch>& watch) const;
  void set(const Pointer& node, const torch::autograd::Edge& to, std::shared_ptr<MemoryWatch> watch);

 private:
  // torch owned its nodes by shared_ptr up to 2.11, and counts them intrusively since.
  template <class Node>
  static std::weak_ptr<Node> weakly(const std::shared_ptr<Node>& node) {
    return node;
  }
  template <class Node>
  static c10::weak_intrusive_ptr<Node> weakly(const c10::intrusive_ptr<Node>& node) {
    return c10::weak_intrusive_ptr<Node>(node);
  }

  decltype(weakly(Pointer())) node_ = weakly(Pointer());
  const torch::autograd::Node* to_ = nullptr;  ///< an identity: it lives as long as the node
  std::uint32_t to_input_ = 0;
  std::shared_ptr<MemoryWatch> watch_;
};

/// Makes `handed_out` (no history, not a leaf yet) the result of fetching `master`: gradients reach the
/// master on its device and in its dtype (Invariant 7), as by the backward of `master.to(device, dtype)`, and
/// differentiable like it.
///
/// Note [Gradients travel on a stream of their own]
/// From an accelerator they are copied into pinned memory on a side stream, after the work that made them, in
/// the smaller of the two dtypes. The node that follows belongs to the CPU: the autograd engine runs it on
/// the thread that called backward(), which has nothing else to do there, and it waits for its copy. So the
/// device goes on with the backward pass meanwhile, and whoever gets a gradient (accumulation, the
/// parameter's hooks, the caller after backward()) gets it whole.
///
/// `watch` counts each gradient as a write to the master, unless it sees every write by itself: an optimizer
/// step is likely to follow, which may bump no version. Null if the master is not watched.
///
/// `shared` is the weight's (Note [Uses of a weight share a node]).
void connect_to_master(const at::Tensor& handed_out, const at::Tensor& master,
                       const std::shared_ptr<MemoryWatch>& watch, GradientNode& shared);

}  // namespace dynswap
