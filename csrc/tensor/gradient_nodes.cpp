#include "tensor/gradient_nodes.h"

#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>

#include "platform/fork_safe.h"
#include "platform/process.h"
#include "tensor/interpreter.h"

namespace dynswap {

namespace autograd = torch::autograd;

namespace {

using NodePtr = SharedNodeOwner::Pointer;

Mutex& mutex() {
  static auto* const one = new Mutex;
  static const bool follows_forks =
      at_fork([] { one->lock(); }, [] { one->unlock(); }, [] { one->unlock(); });
  static_cast<void>(follows_forks);
  return *one;
}

/// What a handed-out tensor is the result of. It passes gradients on to where those of all uses are added.
class UseBackward : public WeaklyKnownNode {
 public:
  UseBackward(const NodePtr& shared, std::shared_ptr<SharedNodeOwner> owner)
      : WeaklyKnownNode(autograd::edge_list{autograd::Edge(shared, 0)}),
        leading_to_(std::move(owner), shared) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override { return std::move(gradients); }

  std::string name() const override { return "DynswapUseBackward"; }

  void release_resources() override {
    WeaklyKnownNode::release_resources();
    leading_to_.end();
  }

  const std::shared_ptr<SharedNodeOwner>& owner() const noexcept { return leading_to_.of(); }

 private:
  SharedNodeOwner::Use leading_to_;
};

/// Gives the node a Python object, which is an owner of the node for as long as there is another. Returns
/// false where nodes do not keep their Python objects.
bool give_python_object(const NodePtr& node) {
  const auto make = Interpreter::get().make_object;
  if (!keeps_python_object<autograd::Node> || make == nullptr) return false;
  make(node);
  return true;
}

}  // namespace

void GradientWatch::follow(const std::shared_ptr<MemoryWatch>& watch) {
  if (watch == watch_) return;
  std::shared_ptr<MemoryWatch> other = watch;
  const std::lock_guard lock(mutex());
  watch_.swap(other);
}

void GradientWatch::note_write() {
  std::shared_ptr<MemoryWatch> watch;
  {
    const std::lock_guard lock(mutex());
    watch = watch_;
  }
  if (watch) watch->note_write();
}

SharedNodeOwner::Use::Use(std::shared_ptr<SharedNodeOwner> of, const Pointer& node) : of_(std::move(of)) {
  if (!of_) return;
  Pointer again = node;
  const std::lock_guard lock(mutex());
  ++of_->uses_;
  if (!of_->node_) of_->node_.swap(again);
}

void SharedNodeOwner::Use::end() noexcept {
  if (!of_) return;
  Pointer dropped;
  {
    const std::lock_guard lock(mutex());
    if (--of_->uses_ == 0) {
      // An alias dies later than the tensor that it owns, and has the node meanwhile.
      const std::size_t ours = of_->alias_.use_count() > 0 ? 2 : 1;
      if (!of_->kept_ || static_cast<std::size_t>(of_->node_.use_count()) <= ours) dropped.swap(of_->node_);
    }
  }
  of_.reset();
}

SharedNodeOwner::Pointer SharedNodeOwner::node() const {
  const std::lock_guard lock(mutex());
  return node_ ? node_ : with_python_object_.lock();
}

bool SharedNodeOwner::keep_for_outside_read(const at::Tensor& alias) {
  const Pointer node = this->node();
  if (!node) return false;
  const bool has_object = give_python_object(node);
  auto known = weakly(node);
  c10::weak_intrusive_ptr<c10::TensorImpl> latest(alias.getIntrusivePtr());
  const std::lock_guard lock(mutex());
  if (has_object) {
    std::swap(with_python_object_, known);
    return false;
  }
  std::swap(alias_, latest);
  return !std::exchange(kept_, true);
}

void SharedNodeOwner::note_used_up() noexcept {
  Pointer dropped;
  const std::lock_guard lock(mutex());
  kept_ = false;
  if (uses_ == 0) dropped.swap(node_);
}

bool SharedNodeOwner::is_kept() const {
  const std::lock_guard lock(mutex());
  return kept_;
}

bool SharedNodeOwner::release(std::vector<Pointer>& released, bool if_idle) {
  Pointer dropped;
  auto known = weakly(Pointer());
  bool none = false;
  {
    const std::lock_guard lock(mutex());
    if (!if_idle) std::swap(with_python_object_, known);
    if (node_ && (!if_idle || node_.use_count() == 1)) dropped.swap(node_);
    none = !node_ && with_python_object_.expired();
  }
  if (dropped) released.push_back(std::move(dropped));
  return none;
}

NodePtr GradientNodes::shared(const at::Tensor& handed_out, const autograd::Edge& to) const {
  if (!shared_ || to.function.get() != to_ || to.input_nr != to_input_) return {};
  NodePtr node = shared_->node();
  if (!node) return {};
  const autograd::InputMetadata& made_for = node->input_metadata(0);
  const bool same = made_for.device() == handed_out.device() &&
                    made_for.dtype().toScalarType() == handed_out.scalar_type() &&
                    made_for.is_same_shape(handed_out);
  return same ? node : NodePtr();
}

/// One that others own twice is on no list (Note [Nodes are taken apart before they die]). One that they own
/// once may be, and gets no second tensor. The order in which gradients are added is the same: such a node
/// passes the gradient of one operation on, which comes after those of all later uses.
NodePtr GradientNodes::last_use(const NodePtr& leading_to) const {
  NodePtr node = last_use_.lock();
  const bool owned_twice = node && node.use_count() > 2;
  return owned_twice && node->next_edge(0).function == leading_to ? node : NodePtr();
}

void GradientNodes::set_shared(NodePtr node, const autograd::Edge& to, std::shared_ptr<GradientWatch> watch) {
  shared_ = std::make_shared<SharedNodeOwner>(node);
  static_cast<MeetingNode&>(*node).owned_by(shared_);
  to_ = to.function.get();
  to_input_ = to.input_nr;
  watch_ = std::move(watch);
}

void GradientNodes::release(std::vector<Pointer>& released, bool if_idle) {
  if (!shared_ || !shared_->release(released, if_idle)) return;
  shared_.reset();
  watch_.reset();
}

NodePtr GradientNodes::use_of(const NodePtr& shared, const at::Tensor& handed_out) {
  NodePtr use = last_use(shared);
  if (!use) {
    use = internal::new_node<UseBackward>(shared, shared_);
    use->add_input_metadata(handed_out);
    last_use_ = weakly(use);
  }
  return use;
}

GradientTarget gradient_target_of_all_uses(const at::Tensor& handed_out) {
  const autograd::Edge own = autograd::impl::gradient_edge(handed_out);
  const auto* const use = dynamic_cast<const UseBackward*>(own.function.get());
  return use == nullptr ? GradientTarget{own, nullptr} : GradientTarget{use->next_edge(0), use->owner()};
}

void NodesReadOutside::take(NodesReadOutside& earlier) {
  const std::vector<std::shared_ptr<SharedNodeOwner>> nodes = std::exchange(earlier.nodes_, {});
  nodes_.insert(nodes_.end(), nodes.begin(), nodes.end());
}

void NodesReadOutside::release_idle(std::vector<SharedNodeOwner::Pointer>& released) {
  std::erase_if(nodes_, [&](const auto& node) {
    return node->release(released, /*if_idle=*/true) || !node->is_kept();
  });
}

void NodesReadOutside::release_all(std::vector<SharedNodeOwner::Pointer>& released) {
  for (const auto& node : std::exchange(nodes_, {})) node->release(released, /*if_idle=*/false);
}

}  // namespace dynswap
