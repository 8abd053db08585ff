// The autograd nodes between a handed-out tensor and its master.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/memory_watch.h"

namespace dynswap {

/// Counts the gradients of a master as writes to it. The watch may be another one by the time of the backward
/// pass. Thread-safe; `follow` is called under the GIL.
class GradientWatch {
 public:
  explicit GradientWatch(std::shared_ptr<MemoryWatch> watch) : watch_(std::move(watch)) {}

  void follow(const std::shared_ptr<MemoryWatch>& watch) {
    if (watch == watch_) return;
    const std::lock_guard lock(mutex_);
    watch_ = watch;
  }
  void note_write() {
    const std::lock_guard lock(mutex_);
    if (watch_) watch_->note_write();
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<MemoryWatch> watch_;  ///< LOCK: mutex_ to set it, and to read it without the GIL
};

/// The node that all tensors are the results of which are handed out of one weight.
///
/// Note [Uses of a weight share a node]
/// A streamed weight that is used twice in a pass is handed out twice, as two tensors. Were the gradient of
/// each rounded to the master's dtype by itself, the two would be added there. Without an install they meet
/// in the parameter's AccumulateGrad, and are added where and in what the model computes. So the tensors are
/// the results of one node, which carries the sum. And a gradient that is asked for by one of them
/// (`torch.autograd.grad(loss, module.weight)`) is that of all.
///
/// Note [Nodes are taken apart before they die]
/// torch destroys a graph without recursion: a node that it sees owned once is put on a list, and loses its
/// edges when its turn comes. Whoever locks a weak pointer to it meanwhile has a node that leads nowhere, and
/// the gradients that reach it are lost. So the weight owns its node, which is on no list then. As the node
/// leads to the master, which would not be freed with its module, the session lets go of nodes that nobody
/// else has: when a call begins, when the master leaves or is replaced, and before the garbage collector
/// looks for cycles (a hook of the master may refer to the model).
///
/// LOCK: the GIL guards it.
class SharedNode {
 public:
  using Pointer = decltype(torch::autograd::Edge::function);

  /// Whether the node can have `handed_out` as one more result, whose gradient goes `to`. If nobody has the
  /// node, it has to be as a new one would be.
  bool serves(const at::Tensor& handed_out, const torch::autograd::Edge& to) const;
  const Pointer& node() const noexcept { return node_; }
  void set(Pointer node, const torch::autograd::Edge& to, std::shared_ptr<GradientWatch> watch);

  /// Adds to `released` what nobody else has; to be destroyed when no change is under way, since destroying a
  /// node may run any code. Returns whether nothing is left.
  bool release_if_idle(std::vector<Pointer>& released);
  void release(std::vector<Pointer>& released);

  /// The node's; null: it counts no writes.
  const std::shared_ptr<GradientWatch>& watch() const noexcept { return watch_; }

  bool listed = false;  ///< the session looks at it when it lets go of nodes

 private:
  bool idle() const noexcept { return node_.use_count() == 1; }

  Pointer node_;
  std::vector<Pointer> earlier_;               ///< in whose place it is
  const torch::autograd::Node* to_ = nullptr;  ///< an identity: it lives as long as the node
  std::uint32_t to_input_ = 0;
  std::shared_ptr<GradientWatch> watch_;
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
/// `known` is the weight's (Note [Uses of a weight share a node]). `to` is where the gradient goes: the
/// master's own edge, or for a slice destination_of_slice().
void connect_to_master(const at::Tensor& handed_out, const at::Tensor& master,
                       const torch::autograd::Edge& to, const std::shared_ptr<MemoryWatch>& watch,
                       SharedNode& known);

/// Where the gradient of the master's slice goes, which `view` is: to a node that puts the gradients of all
/// slices together, so that the master gets one of its size, however many were used. `known` is the
/// master's.
torch::autograd::Edge destination_of_slice(const at::Tensor& master, const at::Tensor& view,
                                           std::int64_t index, SharedNode& known);

}  // namespace dynswap
