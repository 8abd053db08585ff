// The autograd nodes that the uses of a weight share, and who owns them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "io/memory_watch.h"

namespace dynswap {

namespace internal {

template <class Pointer, class Made>
struct NewNode {
  template <class... Arguments>
  static c10::intrusive_ptr<Made> make(Arguments&&... arguments) {
    return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
  }
};

template <class Node, class Made>
struct NewNode<std::shared_ptr<Node>, Made> {
  template <class... Arguments>
  static std::shared_ptr<Made> make(Arguments&&... arguments) {
    return std::shared_ptr<Made>(new Made(std::forward<Arguments>(arguments)...),
                                 [](Made* node) { deleteNode(node); });
  }
};

template <class Made, class... Arguments>
auto new_node(Arguments&&... arguments) {
  return NewNode<decltype(torch::autograd::Edge::function), Made>::make(
      std::forward<Arguments>(arguments)...);
}

}  // namespace internal

// LOCK, in what follows, is one mutex for all objects. It is held over a fork, so that a child does not find
// them half changed. It is the last that a thread takes, and nothing is destroyed under it.

/// Counts the gradients of a master as writes to it. The watch may be another one by the time of the backward
/// pass. Thread-safe; `follow` is called under the GIL.
class GradientWatch {
 public:
  explicit GradientWatch(std::shared_ptr<MemoryWatch> watch) : watch_(std::move(watch)) {}

  void follow(const std::shared_ptr<MemoryWatch>& watch);
  void note_write();

 private:
  std::shared_ptr<MemoryWatch> watch_;  ///< LOCK: to set it, and to read it without the GIL
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

/// Owns a node that several nodes lead to, in addition to their edges.
///
/// Note [Nodes are taken apart before they die]
/// torch destroys a graph without recursion: a node that it sees owned once is put on a list, and loses its
/// edges when its turn comes. What locks a weak pointer to it meanwhile has a node that leads nowhere, and
/// the gradients that reach it are lost. So a node that may still be found has an owner in addition to the
/// edges that lead to it, and is on no list. That is this object, for as long as a node that leads to it
/// lives (SharedNodeOwner::Use).
///
/// Note [Nodes that are read outside a forward]
/// A graph of something that was read outside a forward leads to the shared node itself, so that a gradient
/// that is asked for by one read is that of all. Such a graph has an edge to the node and does not own it
/// otherwise. From torch 2.13 on we give the node a Python object: it owns the node, and lives as long as
/// anything else does, so a weak pointer is safe. With older versions of torch, the node is owned here until
/// a backward pass has used it up or nothing else owns it. The session looks for that when a call begins,
/// when a master is replaced, and before a garbage collection. It is not done on every version because a node
/// that lives keeps the master and its AccumulateGrad, which has the shape of when it was made: wrong after
/// `p.data = t`.
class SharedNodeOwner {
 public:
  using Pointer = decltype(torch::autograd::Edge::function);

  explicit SharedNodeOwner(Pointer node) : node_(std::move(node)) {}

  /// Owns the node with others.
  class Use {
   public:
    Use() = default;
    /// Begins a use of the owner's `node`, which the owner has again if it had let go of it meanwhile.
    Use(std::shared_ptr<SharedNodeOwner> of, const Pointer& node);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() { end(); }
    void end() noexcept;

    const std::shared_ptr<SharedNodeOwner>& of() const noexcept { return of_; }

   private:
    std::shared_ptr<SharedNodeOwner> of_;
  };

  /// The node; null if nobody can find it any more.
  Pointer node() const;
  /// Owns the node until it is idle, or used up. `alias` is what was read, and a result of the node; it owns
  /// a tensor whose node is a Use. Returns whether that is new.
  bool keep_for_outside_read(const at::Tensor& alias);
  bool is_kept() const;
  /// Notes that a backward pass has gone through, and that the graph is not to be used again.
  void note_used_up() noexcept;
  /// No longer owns the node, which is added to `released`: to be destroyed when no change is under way, as
  /// that may run any code. `if_idle`: unless somebody else has it. Returns whether it owns none. Under the
  /// GIL.
  bool release(std::vector<Pointer>& released, bool if_idle);

 private:
  // LOCK guards all below.
  Pointer node_;
  decltype(weakly(Pointer())) with_python_object_ = weakly(Pointer());  ///< the node, where that is safe
  std::size_t uses_ = 0;
  bool kept_ = false;
  /// The latest alias; asked for no more than whether it is there.
  c10::weak_intrusive_ptr<c10::TensorImpl> alias_{c10::intrusive_ptr<c10::TensorImpl>()};
};

/// Nodes that were read outside a forward (Note [Nodes that are read outside a forward]).
/// LOCK: the GIL guards it.
class NodesReadOutside {
 public:
  void keep(std::shared_ptr<SharedNodeOwner> node) { nodes_.push_back(std::move(node)); }
  /// Takes over those of `earlier`.
  void take(NodesReadOutside& earlier);
  /// Lets go of those that nothing else uses.
  void release_idle(std::vector<SharedNodeOwner::Pointer>& released);
  void release_all(std::vector<SharedNodeOwner::Pointer>& released);

 private:
  std::vector<std::shared_ptr<SharedNodeOwner>> nodes_;
};

/// The sequence number of nodes that run as soon as they can, like AccumulateGrad. Autograd runs the ready
/// node with the highest number first. With its usual number, a shared node that was made early would wait
/// for every later one: gradients would be added in another order than without an install, and would stay on
/// the device until the end of the pass.
constexpr std::uint64_t kAtOnce = UINT64_MAX;

/// A node to which its weight has a weak pointer, which keeps the object when nobody has the node any more.
/// What hangs on it goes all the same: it may lead to the master, or to the model. (Where nodes are owned by
/// shared_ptr, they are destroyed then.)
class WeaklyKnownNode : public torch::autograd::Node {
 public:
  explicit WeaklyKnownNode(torch::autograd::edge_list&& to) : Node(kAtOnce, std::move(to)) {}

  virtual void release_resources() {
    release_base(static_cast<Node&>(*this));
    pre_hooks_.clear();
    tensor_pre_hooks_.clear();
    retains_grad_hooks_.clear();
    post_hooks_.clear();
    anomaly_metadata_.reset();
  }

 private:
  template <class Base>
  static void release_base(Base& node) {
    if constexpr (requires { node.Base::release_resources(); }) node.Base::release_resources();
  }
};

/// Where the gradients of several nodes meet.
class MeetingNode : public WeaklyKnownNode {
 public:
  using WeaklyKnownNode::WeaklyKnownNode;

  void owned_by(const std::shared_ptr<SharedNodeOwner>& owner) { owner_ = owner; }

  /// Autograd calls this after a backward pass that does not retain the graph, or when it destroys the graph.
  void release_variables() override {
    if (const auto owner = owner_.lock()) owner->note_used_up();
  }

 private:
  std::weak_ptr<SharedNodeOwner> owner_;
};

/// Where a gradient goes.
struct GradientTarget {
  torch::autograd::Edge edge;
  std::shared_ptr<SharedNodeOwner> node;  ///< that of the edge, where it is shared; null: it is not ours
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
  using Pointer = SharedNodeOwner::Pointer;

  /// What all uses lead to, if it would be made the same way now; else null.
  Pointer shared(const at::Tensor& handed_out, const torch::autograd::Edge& to) const;
  /// The node that one more tensor is to be the result of, which leads to `shared`.
  Pointer use_of(const Pointer& shared, const at::Tensor& handed_out);
  void set_shared(Pointer node, const torch::autograd::Edge& to, std::shared_ptr<GradientWatch> watch);

  /// The owner of what all uses lead to; null: there is none.
  const std::shared_ptr<SharedNodeOwner>& owner() const noexcept { return shared_; }
  /// The watch that counts the gradients of the master as writes to it; null if there is none.
  const std::shared_ptr<GradientWatch>& watch() const noexcept { return watch_; }
  void release(std::vector<Pointer>& released, bool if_idle);

 private:
  Pointer last_use(const Pointer& leading_to) const;

  std::shared_ptr<SharedNodeOwner> shared_;
  decltype(weakly(Pointer())) last_use_ = weakly(Pointer());
  const torch::autograd::Node* to_ = nullptr;  ///< an identity: it lives as long as the shared node
  std::uint32_t to_input_ = 0;
  std::shared_ptr<GradientWatch> watch_;
};

/// Where the gradients of all uses of a weight are added, of which `handed_out` is one.
GradientTarget gradient_target_of_all_uses(const at::Tensor& handed_out);

}  // namespace dynswap
