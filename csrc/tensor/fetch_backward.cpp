#include "tensor/fetch_backward.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "accelerator/device_runtime.h"
#include "accelerator/plain_torch.h"
#include "accelerator/torch_stream.h"
#include "core/protection.h"
#include "platform/fork_safe.h"
#include "tensor/autograd_state.h"

namespace dynswap {

namespace autograd = torch::autograd;

namespace {

using NodePtr = SharedNodeOwner::Pointer;

at::TensorOptions place_of(const at::Tensor& tensor) {
  return at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device());
}

/// The stream of a device that carries gradients away; none where the device has one stream only.
std::optional<c10::Stream> side_stream(const at::Device& device) {
  struct Streams {
    Mutex mutex;
    std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::optional<c10::Stream>>
        of_devices;  ///< LOCK: mutex
  };
  static PerProcess<Streams> streams;
  Streams& known = *streams;
  const std::lock_guard lock(known.mutex);
  const auto [entry, is_new] = known.of_devices.try_emplace({device.type(), device.index()});
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
  ArriveBackward(const at::Tensor& master, const GradientTarget& to, std::shared_ptr<GradientWatch> watch)
      : Node(autograd::edge_list{to.edge}),
        leading_to_(to.node, to.edge.function),
        master_(place_of(master)),
        watch_(std::move(watch)) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor()};
    if (Arrival* const arrival = arrival_of(gradient)) {
      if (PROTECTED(gradient_arrived)) arrival->copied.synchronize();
      arrival->sent.reset();
    }
    watch_->note_write();
    return {gradient.to(master_)};
  }

  std::string name() const override { return "DynswapArriveBackward"; }

 private:
  const SharedNodeOwner::Use leading_to_;
  const at::TensorOptions master_;
  const std::shared_ptr<GradientWatch> watch_;
};

/// Takes a gradient from an accelerator to the host.
class CarryBackward : public MeetingNode {
 public:
  CarryBackward(NodePtr arrive, at::TensorOptions host)
      : MeetingNode(autograd::edge_list{autograd::Edge(std::move(arrive), 0)}), host_(host) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor()};
    // One that is differentiated again, is sparse or empty, or that somebody looks at on its way, goes
    // torch's own way; and all where the device has no other stream, or torch no pinned memory for it.
    if (at::GradMode::is_enabled() || !has_own_bytes(gradient) || gradient.numel() == 0 || is_looked_at())
      return {gradient.to(host_)};
    const at::Device device = gradient.device();
    const std::optional<c10::Stream> other = side_stream(device);
    if (!other || is_captured(*other)) return {gradient.to(host_)};
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

 private:
  /// Anomaly mode reads what a node returns, and hooks do, before the node that waits runs.
  bool is_looked_at() const {
    autograd::Node& arrive = *next_edge(0).function;
    return autograd::AnomalyMode::is_enabled() || !post_hooks().empty() || !arrive.pre_hooks().empty() ||
           !arrive.tensor_pre_hooks().empty();
  }

  const at::TensorOptions host_;
};

/// Takes a gradient to its master in one step: where the two are on one device, or the master is on an
/// accelerator.
class FetchBackward : public MeetingNode {
 public:
  FetchBackward(const at::Tensor& master, const GradientTarget& to, std::shared_ptr<GradientWatch> watch)
      : MeetingNode(autograd::edge_list{to.edge}),
        leading_to_(to.node, to.edge.function),
        master_(place_of(master)),
        watch_(std::move(watch)) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor()};
    watch_->note_write();
    return {gradient.to(master_)};
  }

  std::string name() const override { return "DynswapFetchBackward"; }

 private:
  const SharedNodeOwner::Use leading_to_;
  const at::TensorOptions master_;
  const std::shared_ptr<GradientWatch> watch_;
};

/// Puts the gradients of a master's slices together.
class StackBackward : public MeetingNode {
 public:
  StackBackward(const at::Tensor& master, const autograd::Edge& to)
      : MeetingNode(autograd::edge_list{to}), sizes_(master.sizes().vec()), options_(place_of(master)) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (at::GradMode::is_enabled()) {  // it is differentiated again
      for (at::Tensor& gradient : gradients) {
        if (!gradient.defined()) gradient = at::zeros(at::IntArrayRef(sizes_).slice(1), options_);
      }
      return {at::stack(gradients)};
    }
    const at::Tensor whole = at::zeros(sizes_, options_);
    // Plain torch adds up one gradient of the whole size for each slice.
    const auto used = std::count_if(gradients.begin(), gradients.end(),
                                    [](const at::Tensor& gradient) { return gradient.defined(); });
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      const at::Tensor row = whole.select(0, static_cast<std::int64_t>(i));
      used > 1 ? row.add_(gradients[i]) : row.copy_(gradients[i]);
      gradients[i].reset();
    }
    return {whole};
  }

  std::string name() const override { return "DynswapStackBackward"; }

 private:
  const std::vector<std::int64_t> sizes_;
  const at::TensorOptions options_;
};

/// A node that takes a gradient to the device and dtype of the master.
NodePtr fetch_node(const at::Tensor& handed_out, const at::Tensor& master, const GradientTarget& to,
                   const std::shared_ptr<GradientWatch>& watch) {
  NodePtr node;
  if (handed_out.device() == master.device() || !master.is_cpu()) {
    node = internal::new_node<FetchBackward>(master, to, watch);
  } else {
    // The bus carries the smaller dtype.
    const bool as_computed = handed_out.element_size() <= master.element_size();
    const at::TensorOptions host =
        place_of(master).dtype(as_computed ? handed_out.scalar_type() : master.scalar_type());
    auto arrive = internal::new_node<ArriveBackward>(master, to, watch);
    arrive->add_input_metadata(host, handed_out.sym_sizes(), /*is_tensor_subclass=*/false,
                               /*is_nested=*/false, std::nullopt);
    node = internal::new_node<CarryBackward>(std::move(arrive), host);
  }
  node->add_input_metadata(handed_out);
  return node;
}

}  // namespace

GradientTarget gradient_target_of(const at::Tensor& master) { return {gradient_edge_of(master), nullptr}; }

GradientTarget gradient_target_of_slice(const at::Tensor& master, const autograd::Edge& to,
                                        const at::Tensor& view, std::int64_t index, GradientNodes& known) {
  NodePtr stack = known.shared(view, to);
  if (!stack) {
    stack = internal::new_node<StackBackward>(master, to);
    for (std::int64_t i = 0; i < master.size(0); ++i) stack->add_input_metadata(view);
    known.set_shared(stack, to, nullptr);
  }
  return {autograd::Edge(std::move(stack), static_cast<std::uint32_t>(index)), known.owner()};
}

void connect_to_master(const at::Tensor& handed_out, const at::Tensor& master, const GradientTarget& to,
                       const std::shared_ptr<MemoryWatch>& watch, GradientNodes& known) {
  NodePtr shared = known.shared(handed_out, to.edge);
  if (shared) {
    known.watch()->follow(watch);
  } else {
    const auto counts = std::make_shared<GradientWatch>(watch);
    shared = fetch_node(handed_out, master, to, counts);
    known.set_shared(shared, to.edge, counts);
  }
  autograd::impl::set_gradient_edge(handed_out, {known.use_of(shared, handed_out), 0});
}

}  // namespace dynswap
