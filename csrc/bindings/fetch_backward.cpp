#include "bindings/fetch_backward.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

namespace dynswap {

namespace autograd = torch::autograd;

namespace {

// torch owned its nodes by shared_ptr up to 2.11, and counts them intrusively since.
template <class Pointer, class Made>
struct NewNode {
  static Pointer make(const at::Tensor& master) { return c10::make_intrusive<Made>(master); }
};

template <class Node, class Made>
struct NewNode<std::shared_ptr<Node>, Made> {
  static std::shared_ptr<Node> make(const at::Tensor& master) {
    return std::shared_ptr<Node>(new Made(master), [](Node* node) { deleteNode(node); });
  }
};

}  // namespace

FetchBackward::FetchBackward(const at::Tensor& master)
    : Node(autograd::edge_list{autograd::impl::gradient_edge(master)}),
      master_(at::TensorOptions().dtype(master.scalar_type()).device(master.device())) {}

autograd::variable_list FetchBackward::apply(autograd::variable_list&& gradients) {
  const at::Tensor& gradient = gradients[0];
  return {gradient.defined() ? gradient.to(master_) : at::Tensor()};
}

void FetchBackward::connect(const at::Tensor& handed_out, const at::Tensor& master) {
  auto node = NewNode<decltype(autograd::Edge::function), FetchBackward>::make(master);
  node->add_input_metadata(handed_out);
  autograd::impl::set_gradient_edge(handed_out, {std::move(node), 0});
}

}  // namespace dynswap
