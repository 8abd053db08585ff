// The autograd nodes between a handed-out tensor and its master.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>

#include "io/memory_watch.h"

namespace dynswap {

/// A node that several nodes lead to, owned by them beside their edges, for as long as one of them lives.
///
/// Note [Nodes are taken apart before they die]
/// torch destroys a graph without recursion: a node that it sees owned once is put on a list, and loses its
/// edges when its turn comes. Whoever locks a weak pointer to it meanwhile has a node that leads nowhere, and
/// the gradients that reach it are lost. So no node that leads somewhere is known by a weak pointer to
/// itself. What is shared has an owner more than its edges while anybody may find it, so it is never on the
/// list.
struct SharedNode {
  using Pointer = decltype(torch::autograd::Edge::function);
  Pointer node;
};

/// Where a gradient goes.
struct Destination {
  torch::autograd::Edge edge;
  std::shared_ptr<const SharedNode> node;  ///< that of the edge, where it is shared; null: it is not ours
};

/// The nodes that a weight's handed-out tensors are the results of, for as long as some graph has them.
///
/// Note [Uses of a weight share a node]
/// A streamed weight that is used twice in a pass is handed out twice, as two tensors. Were the gradient of
/// each rounded to the master's dtype by itself, the two would be added there. Without an install they meet
/// in the parameter's AccumulateGrad, and are added where and in what the model computes. So the nodes of all
/// of a weight's tensors lead to one, which carries the sum.
class GradientNodes {
 public:
  using Pointer = SharedNode::Pointer;

  /// What all uses lead to, if it would be made the same way now; else null.
  std::shared_ptr<const SharedNode> shared(const at::Tensor& handed_out, const torch::autograd::Edge& to,
                                           const std::shared_ptr<MemoryWatch>& watch) const;
  /// The node of the tensor that was handed out last, if one more tensor may be its result.
  Pointer last_use(const SharedNode& leading_to) const;
  void set_shared(const std::shared_ptr<const SharedNode>& shared, const torch::autograd::Edge& to,
                  std::shared_ptr<MemoryWatch> watch);
  void set_last_use(const Pointer& node) { last_use_ = weakly(node); }

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

  std::weak_ptr<const SharedNode> shared_;
  decltype(weakly(Pointer())) last_use_ = weakly(Pointer());
  const torch::autograd::Node* to_ = nullptr;  ///< an identity: it lives as long as the shared node
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
/// `known` is the weight's (Note [Uses of a weight share a node]).
void connect_to_master(const at::Tensor& handed_out, const at::Tensor& master,
                       const std::shared_ptr<MemoryWatch>& watch, GradientNodes& known);
/// The same where the gradient goes `to` another place than the master, which is a view.
void connect_to_master(const at::Tensor& handed_out, const at::Tensor& master, const Destination& to,
                       const std::shared_ptr<MemoryWatch>& watch, GradientNodes& known);

/// Where the gradient of the master's slice goes, which `view` is: to a node that puts the gradients of all
/// slices together, so that the master gets one of its size, however many were used. `known` is the
/// master's.
Destination destination_of_slice(const at::Tensor& master, const at::Tensor& view, std::int64_t index,
                                 GradientNodes& known);

/// Where the gradients of all uses of a weight are added, of which `handed_out` is one.
torch::autograd::Edge edge_of_all_uses(const at::Tensor& handed_out);

}  // namespace dynswap
