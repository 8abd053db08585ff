#include "session/saved.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "accelerator/plain_torch.h"
#include "core/protection.h"
#include "session/calls.h"
#include "session/python_content.h"
#include "session/session.h"
#include "tensor/handed_out.h"
#include "tensor/master_memory.h"

namespace dynswap {

void refuse_if_written(std::uint32_t saved, std::uint32_t now, const at::Tensor& like,
                       at::IntArrayRef sizes) {
  if (saved == now || !PROTECTED(saved_version_checked)) return;
  const std::string type = like.toString();
  throw std::runtime_error(
      "one of the variables needed for gradient computation has been modified by an inplace operation: [" +
      type + " " + c10::str(sizes) + "] is at version " + std::to_string(now) + "; expected version " +
      std::to_string(saved) + " instead.");
}

namespace {

/// None of a tensor without memory of its own, nor of one that was handed out: who has that is asked for.
const void* storage_of(const c10::TensorImpl& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const c10::StorageImpl* const storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  return HandedOut::of(*storage) == nullptr ? storage : nullptr;
}

}  // namespace

SavedOriginal::SavedOriginal(const at::Tensor& saved)
    : tensor_(saved.getIntrusivePtr()),
      storage_(has_own_bytes(saved) ? storage_of(*saved.unsafeGetTensorImpl()) : nullptr) {}

at::Tensor SavedOriginal::if_alive() const {
  if (storage_ == nullptr) return {};
  auto alive = tensor_.lock();
  if (!alive || storage_of(*alive) != storage_) return {};
  return at::Tensor::wrap_tensor_impl(std::move(alive));
}

namespace {

void refuse_if_written(std::uint32_t saved, std::uint32_t now, const at::Tensor& tensor) {
  if (saved != now) dynswap::refuse_if_written(saved, now, tensor, tensor.sizes());  // a nested one has none
}

/// Any other tensor. Detached: were it the tensor itself, an operation's output would own its own graph.
struct SavedTensor final : Saved {
  explicit SavedTensor(const at::Tensor& saved)
      : original(saved), tensor(alias_of(saved)), version(version_of(tensor)) {}
  at::Tensor unpack() override {
    refuse_if_written(version, version_of(tensor), tensor);
    at::Tensor alive = original.if_alive();
    return alive.defined() ? alive : tensor;
  }
  const SavedOriginal original;
  const at::Tensor tensor;
  const std::uint32_t version;
};

/// A weight that is copied again for backward, streamed or copied by torch, or a view of one.
struct SavedWeight final : Saved {
  SavedWeight(const HandedOut& record, const at::Tensor& view)
      : session(session_of(record)),
        weight(weight_of(record)),
        master(record.master()),
        content(record.content()),
        sharing(record.sharing()),
        seen(sharing ? sharing->now() : Sharing::Seen{.version = version_of(master), .ours = 0}),
        times_given(weight->times_given()),
        given_then(*times_given),
        options(view.options()),
        sizes(view.sizes().vec()),
        strides(view.strides().vec()),
        offset(view.storage_offset()) {}

  at::Tensor unpack() override {
    refuse_if_written(given_then, *times_given, master);
    // Plain torch would have saved the master.
    if (!sharing || !sharing->only_ours_since(seen))
      refuse_if_written(seen.version, version_of(master), master);
    const std::shared_ptr<Session> serving = session.lock();
    at::Tensor whole = serving ? serving->fetch_again(*weight, master, reader) : at::Tensor();
    const PlainTorch guard;
    // The model was uninstalled since, or is gone.
    if (!whole.defined()) {
      const at::Tensor readable = content          ? content->values()
                                  : weight->mapped ? read_master(master, weight->name)
                                                   : master;
      const KeptLocked kept(readable, options.device());
      whole = readable.to(options, /*non_blocking=*/false, /*copy=*/true);
    }
    return whole.as_strided(sizes, strides, offset);
  }

  const std::weak_ptr<Session> session;
  const std::shared_ptr<Weight> weight;
  const at::Tensor master;
  const std::shared_ptr<MasterContent> content;
  const std::shared_ptr<Sharing> sharing;
  const Sharing::Seen seen;
  const std::shared_ptr<const std::uint32_t> times_given;
  const std::uint32_t given_then;
  const at::TensorOptions options;
  const std::vector<std::int64_t> sizes, strides;
  const std::int64_t offset;
  const std::thread::id reader = std::this_thread::get_id();  ///< whose order backward takes up
};

/// How a wrapper is put together around its inner tensors (Note [Subclasses are taken apart]).
struct Wrapping {
  py::object type, context, size, stride;
  py::object operator()(const py::dict& inner) const {
    return type.attr("__tensor_unflatten__")(inner, context, size, stride);
  }
};

/// A wrapper with streamed weights in it.
struct SavedWrapper final : Saved {
  at::Tensor unpack() override {
    py::dict inner;
    for (const auto& [name, saved] : parts) inner[name] = py::cast(saved->unpack());
    return wrap(inner).cast<at::Tensor>();
  }
  std::vector<std::pair<py::object, std::unique_ptr<Saved>>> parts;
  Wrapping wrap;
};

/// The inner tensors of a wrapper, and how to wrap such again; nothing if it is none, or of no installed
/// model. One that requires gradients is none: its own `.to()` is part of the graph.
std::optional<std::pair<py::dict, Wrapping>> taken_apart(const at::Tensor& tensor) {
  const Session* const session = innermost_session();
  if (session == nullptr || tensor.requires_grad()) return std::nullopt;
  const py::object wrapper = py::cast(tensor);
  const py::object names = session->hooks().inner_names_or_streams(wrapper, /*in_place=*/false);
  if (!py::isinstance<py::list>(names)) return std::nullopt;
  py::dict inner;
  for (const py::handle name : names) inner[name] = wrapper.attr(py::reinterpret_borrow<py::object>(name));
  const py::tuple flat = wrapper.attr("__tensor_flatten__")();
  return std::pair(
      inner, Wrapping{py::type::of(wrapper), flat[1], wrapper.attr("size")(), wrapper.attr("stride")()});
}

/// The reference to keep instead of a wrapper; null if nothing in it streams.
std::unique_ptr<Saved> wrapper_reference_to(const at::Tensor& tensor) {
  const auto apart = taken_apart(tensor);
  if (!apart) return nullptr;
  auto saved = std::make_unique<SavedWrapper>();
  saved->wrap = apart->second;
  bool any = false;
  for (const auto& [name, part] : apart->first) {
    const at::Tensor& held = THPVariable_Unpack(part.ptr());
    std::unique_ptr<Saved> reference = reference_to(held);
    any = any || reference;
    if (!reference) reference = kept(held);
    saved->parts.emplace_back(py::reinterpret_borrow<py::object>(name), std::move(reference));
  }
  return any ? std::move(saved) : nullptr;
}

OfMaster wrapper_of_master(const at::Tensor& tensor) {
  const auto apart = taken_apart(tensor);
  if (!apart) return {};
  py::dict inner;
  const Weight* whole = nullptr;
  bool any = false, all = true;
  for (const auto& [name, part] : apart->first) {
    const at::Tensor& held = THPVariable_Unpack(part.ptr());
    const OfMaster of = of_master(held);
    any = any || of.tensor.defined();
    all = all && of.whole != nullptr;
    whole = of.whole;
    inner[name] = py::cast(of.tensor.defined() ? of.tensor : held);
  }
  if (!any) return {};
  return {apart->second(inner).cast<at::Tensor>(), all ? whole : nullptr};
}

/// Whether the tensor is a copy that backward can have made again. A statistic is not, as the forward may
/// write it.
bool can_be_fetched_again(const Session& serving, const Weight& weight, const HandedOut& record) {
  if (record.watched() && !weight.parameter) return false;
  if (weight.path == Weight::AccessPath::copied || Session::sliced(weight)) return true;
  return record.leased() && serving.streams(weight);
}

/// Null if the tensor shows no weight as it was handed out.
HandedOut* record_of(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg()) return nullptr;
  HandedOut* const record = HandedOut::of(*tensor.unsafeGetTensorImpl());
  return record == nullptr || tensor.scalar_type() != record->dtype() ? nullptr : record;
}

bool is_wrapper(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

}  // namespace

std::unique_ptr<Saved> kept(const at::Tensor& tensor) { return std::make_unique<SavedTensor>(tensor); }

std::unique_ptr<Saved> reference_to(const at::Tensor& tensor) {
  if (is_wrapper(tensor)) return wrapper_reference_to(tensor);
  HandedOut* const record = record_of(tensor);
  if (record == nullptr) return nullptr;
  const std::shared_ptr<Weight> weight = weight_of(*record);
  const std::shared_ptr<Session> serving = session_of(*record);
  if (!serving || !can_be_fetched_again(*serving, *weight, *record)) return nullptr;
  serving->write_back(*weight);
  if (!record->master_unchanged()) return nullptr;
  // The forward has written it, and the graph is to have what it wrote. (A leased copy is the engine's no
  // more.)
  if (weight->path == Weight::AccessPath::copied && record->rounded()) return nullptr;
  return std::make_unique<SavedWeight>(*record, tensor);
}

OfMaster of_master(const at::Tensor& tensor) {
  if (is_wrapper(tensor)) return wrapper_of_master(tensor);
  HandedOut* const record = record_of(tensor);
  if (record == nullptr) return {};
  const std::shared_ptr<Weight> weight = weight_of(*record);
  const std::shared_ptr<Session> serving = session_of(*record);
  if (!serving || (record->watched() && !weight->parameter)) return {};
  serving->write_back(*weight);
  if (!record->master_unchanged() || record->rounded()) return {};
  const at::Tensor& master = record->master();
  const c10::DimVector strides = strides_of_copy(master);
  const bool whole =
      tensor.storage_offset() == 0 && tensor.sizes() == master.sizes() && tensor.strides() == strides;
  const auto content = std::static_pointer_cast<PythonContent>(record->content());
  if (whole && !content) return {master, weight.get()};
  // Of a master with gaps, or of a conjugate, a view of the copy is none of the master's memory.
  if (master.strides() != strides || master.is_conj() || master.is_neg()) return {};
  at::Tensor view;
  if (content) {
    view = content->view(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  } else {
    const PlainTorch guard;
    view = master.as_strided(tensor.sizes(), tensor.strides(),
                             master.storage_offset() + tensor.storage_offset());
  }
  const auto& version = master.unsafeGetTensorImpl()->version_counter();
  if (version.enabled() && !view.is_inference()) view.unsafeGetTensorImpl()->set_version_counter(version);
  return {view, whole ? weight.get() : nullptr};
}

}  // namespace dynswap
