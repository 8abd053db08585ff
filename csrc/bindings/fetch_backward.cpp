#include "bindings/fetch_backward.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace dynswap {

namespace autograd = torch::autograd;

namespace {

using NodePtr = decltype(autograd::Edge::function);

// torch owned its nodes by shared_ptr up to 2.11, and counts them intrusively since.
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
  return NewNode<NodePtr, Made>::make(std::forward<Arguments>(arguments)...);
}

at::TensorOptions place_of(const at::Tensor& tensor) {
  return at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device());
}

/// The stream of a device that carries gradients away.
c10::Stream side_stream(const at::Device& device) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, c10::Stream> streams;
  const std::lock_guard lock(mutex);
  const auto known = streams.find({device.type(), device.index()});
  if (known != streams.end()) return known->second;
  const c10::Stream made = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  streams.emplace(std::make_pair(device.type(), device.index()), made);
  return made;
}

/// The end of a gradient's way to the host. See Note [Gradients travel on a stream of their own].
class ArriveBackward : public autograd::Node {
 public:
  explicit ArriveBackward(const at::Tensor& master)
      : Node(autograd::edge_list{autograd::impl::gradient_edge(master)}), master_(place_of(master)) {}

  void expect(c10::Event copied) {
    const std::lock_guard lock(mutex_);
    under_way_.push_back(std::move(copied));
  }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    std::vector<c10::Event> copies;
    {
      const std::lock_guard lock(mutex_);
      copies.swap(under_way_);
    }
    for (const c10::Event& copied : copies) copied.synchronize();
    const at::Tensor& gradient = gradients[0];
    return {gradient.defined() ? gradient.to(master_) : at::Tensor()};
  }

  std::string name() const override { return "DynswapArriveBackward"; }

 private:
  const at::TensorOptions master_;
  std::mutex mutex_;
  std::vector<c10::Event> under_way_;  ///< LOCK: mutex_
};

using ArrivePtr = decltype(new_node<ArriveBackward>(std::declval<const at::Tensor&>()));

/// Takes a gradient from an accelerator to the host.
class CarryBackward : public autograd::Node {
 public:
  CarryBackward(ArrivePtr arrive, at::TensorOptions host)
      : Node(autograd::edge_list{autograd::Edge(arrive, 0)}), arrive_(std::move(arrive)), host_(host) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor()};
    // One that is differentiated again, or is sparse, goes torch's own way.
    if (at::GradMode::is_enabled() || gradient.layout() != at::kStrided) return {gradient.to(host_)};
    const at::Tensor sent = gradient.to(host_.dtype());  // on the device
    const at::Device device = sent.device();
    const c10::Stream side = side_stream(device);
    const at::Tensor arriving = at::empty_strided(sent.sizes(), sent.strides(), host_.pinned_memory(true));
    c10::Event made(device.type());
    made.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    made.block(side);
    c10::Event copied(device.type());
    {
      const c10::StreamGuard guard(side);
      arriving.copy_(sent, /*non_blocking=*/true);
      copied.record(side);
    }
    sent.record_stream(side);
    arrive_->expect(std::move(copied));
    return {arriving};
  }

  std::string name() const override { return "DynswapCarryBackward"; }

 private:
  const ArrivePtr arrive_;
  const at::TensorOptions host_;
};

/// Where the two are on one device.
class FetchBackward : public autograd::Node {
 public:
  explicit FetchBackward(const at::Tensor& master)
      : Node(autograd::edge_list{autograd::impl::gradient_edge(master)}), master_(place_of(master)) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    return {gradient.defined() ? gradient.to(master_) : at::Tensor()};
  }

  std::string name() const override { return "DynswapFetchBackward"; }

 private:
  const at::TensorOptions master_;
};

}  // namespace

void connect_to_master(const at::Tensor& handed_out, const at::Tensor& master) {
  NodePtr node;
  if (handed_out.device() == master.device() || !master.is_cpu()) {
    node = new_node<FetchBackward>(master);
  } else {
    // The bus carries the smaller dtype.
    const bool as_computed = handed_out.element_size() <= master.element_size();
    const at::TensorOptions host =
        place_of(master).dtype(as_computed ? handed_out.scalar_type() : master.scalar_type());
    auto arrive = new_node<ArriveBackward>(master);
    arrive->add_input_metadata(host, handed_out.sym_sizes(), /*is_tensor_subclass=*/false,
                               /*is_nested=*/false, std::nullopt);
    node = new_node<CarryBackward>(std::move(arrive), host);
  }
  node->add_input_metadata(handed_out);
  autograd::impl::set_gradient_edge(handed_out, {std::move(node), 0});
}

}  // namespace dynswap
