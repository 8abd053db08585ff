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

// torch owned its nodes by shared_ptr up to 2.12, and counts them intrusively since.
template <class Node>
std::weak_ptr<Node> weakly(const std::shared_ptr<Node>& node) {
  return node;
}
template <class Node>
c10::weak_intrusive_ptr<Node> weakly(const c10::intrusive_ptr<Node>& node) {
  return c10::weak_intrusive_ptr<Node>(node);
}

/// Whether a node keeps its Python object as long as somebody else has the node: from torch 2.13 on.
template <class Node>
constexpr bool keeps_python_object = requires(Node& node) { node.pyobj_slot(); };

/// A node that several nodes lead to, and its owners beside their edges.
///
/// Note [Nodes are taken apart before they die]
/// torch destroys a graph without recursion: a node that it sees owned once is put on a list, and loses its
/// edges when its turn comes. Whoever locks a weak pointer to it meanwhile has a node that leads nowhere, and
/// the gradients that reach it are lost. So a node that somebody may still find has an owner beside the edges
/// that lead to it, and is on no list. That is this object, for as long as a node that leads to it lives
/// (SharedNode::Use).
///
/// Note [Nodes that are read outside a forward]
/// The graphs of what was read outside a forward lead to the shared node itself, so that a gradient that is
/// asked for by one read is that of all. Such a graph is no owner beside the edges. From torch 2.13 on, a
/// node's Python object is one: it has the node, and the node keeps it as long as anybody else has the node.
/// So the node gets one, and a weak pointer is safe. Before, the node is kept until a backward pass has used
/// it up or the session finds that nobody else has it: it looks when a call begins, when the master is
/// replaced, and before the garbage collector does. That is not done everywhere, because while a node lives
/// so do the master and its AccumulateGrad, which has the shape of when it was made: a parameter may be given
/// another
/// (`p.data = t`).
class SharedNode {
 public:
  using Pointer = decltype(torch::autograd::Edge::function);

  explicit SharedNode(Pointer node) : node_(std::move(node)) {}

  /// Owns the node with others.
  class Use {
   public:
    Use() = default;
    explicit Use(std::shared_ptr<SharedNode> of);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() { end(); }
    void end() noexcept;

    const std::shared_ptr<SharedNode>& of() const noexcept { return of_; }

   private:
    std::shared_ptr<SharedNode> of_;
  };

  /// Null: nobody can find it any more.
  Pointer node() const;
  /// Owns the node until it is idle, or used up. `alias` is what was read, and a result of the node; it owns
  /// a tensor whose node is a Use. Returns whether that is new.
  bool keep(const at::Tensor& alias);
  bool kept() const;
  /// A backward pass has gone through, and the graph is not to be used again.
  void used_up() noexcept;
  /// No longer owns the node, which is added to `released`: to be destroyed when no change is under way, as
  /// that may run any code. `if_idle`: unless somebody else has it. Returns whether it owns none. Under the
  /// GIL.
  bool release(std::vector<Pointer>& released, bool if_idle);

 private:
  mutable std::mutex mutex_;
  // LOCK: mutex_, all below.
  Pointer node_;
  decltype(weakly(Pointer())) with_python_object_ = weakly(Pointer());  ///< the node, where that is safe
  std::size_t uses_ = 0;
  bool kept_ = false;
  /// The latest; not asked for more than whether it is there.
  c10::weak_intrusive_ptr<c10::TensorImpl> alias_{c10::intrusive_ptr<c10::TensorImpl>()};
};

/// Where a gradient goes.
struct Destination {
  torch::autograd::Edge edge;
  std::shared_ptr<SharedNode> node;  ///< that of the edge, where it is shared; null: it is not ours
};

/// The nodes that a weight's handed-out tensors are the results of, for as long as some graph has them.
///
/// Note [Uses of a weight share a node]
/// A streamed weight that is used twice in a pass is handed out twice, as two tensors. Were the gradient of
/// each rounded to the master's dtype by itself, the two would be added there. Without an install they meet
/// in the parameter's AccumulateGrad, and are added where and in what the model computes. So the nodes of all
/// of a weight's tensors lead to one, which carries the sum. And a gradient that is asked for by what was
/// read outside a forward (`torch.autograd.grad(loss, module.weight)`) is that of all.
///
/// LOCK: the GIL guards it.
class GradientNodes {
 public:
  using Pointer = SharedNode::Pointer;

  /// What all uses lead to, if it would be made the same way now; else null.
  Pointer shared(const at::Tensor& handed_out, const torch::autograd::Edge& to) const;
  /// The node of the tensor that was handed out last, if one more tensor may be its result.
  Pointer last_use(const Pointer& leading_to) const;
  void set_shared(Pointer node, const torch::autograd::Edge& to, std::shared_ptr<GradientWatch> watch);
  void set_last_use(const Pointer& node) { last_use_ = weakly(node); }

  /// The owner of what all uses lead to; null: there is none.
  const std::shared_ptr<SharedNode>& owner() const noexcept { return shared_; }
  /// What counts its gradients; null: nothing does.
  const std::shared_ptr<GradientWatch>& watch() const noexcept { return watch_; }
  void release(std::vector<Pointer>& released, bool if_idle);

 private:
  std::shared_ptr<SharedNode> shared_;
  decltype(weakly(Pointer())) last_use_ = weakly(Pointer());
  const torch::autograd::Node* to_ = nullptr;  ///< an identity: it lives as long as the shared node
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
/// `known` is the weight's (Note [Uses of a weight share a node]). `to` is where the gradient goes: to the
/// master (destination_of()), or for a slice to destination_of_slice().
void connect_to_master(const at::Tensor& handed_out, const at::Tensor& master, const Destination& to,
                       const std::shared_ptr<MemoryWatch>& watch, GradientNodes& known);

Destination destination_of(const at::Tensor& master);
/// Where the gradient of the master's slice goes, which `view` is: to a node that puts the gradients of all
/// slices together, so that the master gets one of its size, however many were used. `known` is the
/// master's.
Destination destination_of_slice(const at::Tensor& master, const at::Tensor& view, std::int64_t index,
                                 GradientNodes& known);

/// Where the gradients of all uses of a weight are added, of which `handed_out` is one.
Destination destination_of_all_uses(const at::Tensor& handed_out);

}  // namespace dynswap
