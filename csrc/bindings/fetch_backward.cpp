#include "bindings/fetch_backward.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "accelerator/plain_torch.h"
#include "bindings/glue.h"
#include "core/protection.h"

namespace dynswap {

namespace autograd = torch::autograd;

namespace {

using NodePtr = GradientNode::Pointer;

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

/// The stream of a device that carries gradients away; none where the device has one stream only.
std::optional<c10::Stream> side_stream(const at::Device& device) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::optional<c10::Stream>> streams;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = streams.try_emplace({device.type(), device.index()});
  if (is_new) {
    try {
      entry->second = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    } catch (const c10::Error&) {
      // it stays without one
    }
  }
  return entry->second;
}

/// Pinned memory laid out as `gradient`; undefined where torch has none for the device.
at::Tensor pinned_like(const at::Tensor& gradient, const at::TensorOptions& host) {
  try {
    return at::empty_strided(gradient.sizes(), gradient.strides(), host.pinned_memory(true));
  } catch (const c10::Error&) {
    return {};
  }
}

/// What the storage of a gradient on its way to the host owns. It is the tensor that knows whether it has
/// come, not a node: several backward passes may go through one node, on several threads, and end in the
/// middle.
struct Arrival {
  at::Tensor host;  ///< the bytes, pinned
  /// What they are copied from. Kept meanwhile: autograd adds into a gradient in place, and gives it to a
  /// leaf as its own, where nobody else has it.
  at::Tensor sent;
  c10::Event copied;
};

void delete_arrival(void* context) { delete static_cast<Arrival*>(context); }

Arrival* arrival_of(const at::Tensor& gradient) {
  if (gradient.layout() != at::kStrided || !gradient.has_storage()) return nullptr;
  const c10::DataPtr& data = gradient.storage().data_ptr();
  return data.get_deleter() == &delete_arrival ? static_cast<Arrival*>(data.get_context()) : nullptr;
}

/// A tensor over the bytes of `arrival`, laid out as what was sent.
at::Tensor arriving(std::unique_ptr<Arrival> arrival) {
  const at::Tensor host = arrival->host;
  c10::Storage storage(c10::Storage::use_byte_size_t(), host.nbytes(),
                       c10::DataPtr(host.data_ptr(), arrival.release(), &delete_arrival, host.device()),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), host.key_set(), host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  return tensor;
}

/// The values of a gradient as they can be copied as one block, without lazy bits (which would be resolved on
/// the host, before the data has come). A dimension along which they are the same is sent once.
at::Tensor as_block(at::Tensor gradient) {
  for (std::int64_t dim = 0; dim < gradient.dim(); ++dim) {
    if (gradient.stride(dim) == 0 && gradient.size(dim) > 1) gradient = gradient.narrow(dim, 0, 1);
  }
  gradient = gradient.resolve_conj().resolve_neg();
  return gradient.is_non_overlapping_and_dense() ? gradient : gradient.contiguous();
}

/// The end of a gradient's way to the host. See Note [Gradients travel on a stream of their own].
class ArriveBackward : public autograd::Node {
 public:
  ArriveBackward(const at::Tensor& master, std::shared_ptr<MemoryWatch> watch)
      : Node(autograd::edge_list{autograd::impl::gradient_edge(master)}),
        master_(place_of(master)),
        watch_(std::move(watch)) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor()};
    if (Arrival* const arrival = arrival_of(gradient)) {
      if (PROTECTED(gradient_arrived)) arrival->copied.synchronize();
      arrival->sent.reset();
    }
    if (watch_) watch_->note_write();
    return {gradient.to(master_)};
  }

  std::string name() const override { return "DynswapArriveBackward"; }

 private:
  const at::TensorOptions master_;
  const std::shared_ptr<MemoryWatch> watch_;
};

/// A weight knows its node weakly. When that pointer is the last one, what the node leads to goes all the
/// same: else it would keep the master. (Where nodes are owned by shared_ptr, they are destroyed then.)
class SharedByUses : public autograd::Node {
 public:
  using Node::Node;
  virtual void release_resources() { next_edges_.clear(); }
};

using ArrivePtr =
    decltype(new_node<ArriveBackward>(std::declval<const at::Tensor&>(), std::shared_ptr<MemoryWatch>()));

/// Takes a gradient from an accelerator to the host.
class CarryBackward : public SharedByUses {
 public:
  CarryBackward(ArrivePtr arrive, at::TensorOptions host)
      : SharedByUses(autograd::edge_list{autograd::Edge(arrive, 0)}),
        arrive_(std::move(arrive)),
        host_(host) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor()};
    // One that is differentiated again, is sparse or empty, or that somebody looks at on its way, goes
    // torch's own way; and all where the device has no other stream, or torch no pinned memory for it.
    if (at::GradMode::is_enabled() || !has_own_bytes(gradient) || gradient.numel() == 0 || is_looked_at())
      return {gradient.to(host_)};
    const at::Device device = gradient.device();
    const std::optional<c10::Stream> other = side_stream(device);
    if (!other || capturing(*other)) return {gradient.to(host_)};
    const c10::Stream side = *other;
    const at::Tensor sent = as_block(gradient).to(host_.dtype());  // on the device
    at::Tensor host = pinned_like(sent, host_);
    if (!host.defined()) return {gradient.to(host_)};
    std::unique_ptr<Arrival> arrival(new Arrival{std::move(host), sent, c10::Event(device.type())});
    c10::Event made(device.type());
    made.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    if (PROTECTED(gradient_made)) made.block(side);
    {
      const c10::StreamGuard guard(side);
      arrival->host.copy_(sent, /*non_blocking=*/true);
      arrival->copied.record(side);
    }
    if (PROTECTED(gradient_held)) {
      sent.record_stream(side);
    } else {
      arrival->sent.reset();
    }
    return {arriving(std::move(arrival)).expand(gradient.sizes())};
  }

  std::string name() const override { return "DynswapCarryBackward"; }

  void release_resources() override {
    SharedByUses::release_resources();
    arrive_ = {};
  }

 private:
  /// Anomaly mode reads what a node returns, and hooks do, before the node that waits runs.
  bool is_looked_at() const {
    return autograd::AnomalyMode::is_enabled() || !post_hooks().empty() || !arrive_->pre_hooks().empty() ||
           !arrive_->tensor_pre_hooks().empty();
  }

  ArrivePtr arrive_;
  const at::TensorOptions host_;
};

/// Where the two are on one device.
class FetchBackward : public SharedByUses {
 public:
  FetchBackward(const at::Tensor& master, autograd::Edge to, std::shared_ptr<MemoryWatch> watch)
      : SharedByUses(autograd::edge_list{std::move(to)}),
        master_(place_of(master)),
        watch_(std::move(watch)) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor()};
    if (watch_) watch_->note_write();
    return {gradient.to(master_)};
  }

  std::string name() const override { return "DynswapFetchBackward"; }

 private:
  const at::TensorOptions master_;
  const std::shared_ptr<MemoryWatch> watch_;
};

}  // namespace

NodePtr GradientNode::get(const at::Tensor& handed_out, const autograd::Edge& to,
                          const std::shared_ptr<MemoryWatch>& watch) const {
  if (to.function.get() != to_ || to.input_nr != to_input_ || watch != watch_) return {};
  NodePtr node = node_.lock();
  if (!node) return {};
  const autograd::InputMetadata& made_for = node->input_metadata(0);
  const bool same = made_for.device() == handed_out.device() &&
                    made_for.dtype().toScalarType() == handed_out.scalar_type() &&
                    made_for.is_same_shape(handed_out);
  return same ? node : NodePtr();
}

void GradientNode::set(const NodePtr& node, const autograd::Edge& to, std::shared_ptr<MemoryWatch> watch) {
  node_ = weakly(node);
  to_ = to.function.get();
  to_input_ = to.input_nr;
  watch_ = std::move(watch);
}

void connect_to_master(const at::Tensor& handed_out, const at::Tensor& master,
                       const std::shared_ptr<MemoryWatch>& watch, GradientNode& shared) {
  const autograd::Edge to = autograd::impl::gradient_edge(master);
  if (NodePtr node = shared.get(handed_out, to, watch)) {
    autograd::impl::set_gradient_edge(handed_out, {std::move(node), 0});
    return;
  }
  NodePtr node;
  if (handed_out.device() == master.device() || !master.is_cpu()) {
    node = new_node<FetchBackward>(master, to, watch);
  } else {
    // The bus carries the smaller dtype.
    const bool as_computed = handed_out.element_size() <= master.element_size();
    const at::TensorOptions host =
        place_of(master).dtype(as_computed ? handed_out.scalar_type() : master.scalar_type());
    auto arrive = new_node<ArriveBackward>(master, watch);
    arrive->add_input_metadata(host, handed_out.sym_sizes(), /*is_tensor_subclass=*/false,
                               /*is_nested=*/false, std::nullopt);
    node = new_node<CarryBackward>(std::move(arrive), host);
  }
  node->add_input_metadata(handed_out);
  shared.set(node, to, watch);
  autograd::impl::set_gradient_edge(handed_out, {std::move(node), 0});
}

}  // namespace dynswap
