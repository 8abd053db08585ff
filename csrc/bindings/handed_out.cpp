#include "bindings/handed_out.h"

#include <ATen/ATen.h>

#include <cstring>
#include <stdexcept>
#include <utility>

#include "bindings/plain_torch.h"
#include "bindings/weight.h"

namespace dynswap {

namespace {

void delete_record(void* context) { delete static_cast<HandedOut*>(context); }

/// A tensor that a forward has been handed. `.data = t` would give it other bytes and the master none: that
/// is refused, as it would be lost. (Outside a forward there is an alias, dynswap_ext/_outside.py, which
/// knows the master.)
class HandedOutImpl final : public c10::TensorImpl {
 public:
  using c10::TensorImpl::TensorImpl;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>&) override {
    throw std::runtime_error(
        "`.data = t` on a weight of an installed model, inside a forward, would be lost: the tensor is the "
        "forward's own. Write in place (`.data.copy_(t)`), or assign outside the forward");
  }
};

}  // namespace

HandedOut::HandedOut(const Origin& origin, const at::Tensor& master, const at::Device& device)
    : origin_(origin),
      options_(at::TensorOptions().dtype(origin.weight->wanted).device(device)),
      source_(origin.weight->source),
      master_written_(origin.weight->silent) {
  master_ = alias_of(master);
  master_version_ = version_of(master_);
  bytes_ = static_cast<std::size_t>(master.numel()) * options_.dtype().itemsize();
}

at::Tensor HandedOut::make(Lease lease, const Origin& origin, const at::Tensor& master,
                           const at::Device& device) {
  std::unique_ptr<HandedOut> record(new HandedOut(origin, master, device));
  record->data_ = lease.data();
  record->lease_ = std::move(lease);
  return finish(std::move(record), master);
}

at::Tensor HandedOut::make_private(const Origin& origin, const at::Tensor& master, const at::Device& device) {
  const PlainTorch guard;
  std::unique_ptr<HandedOut> record(new HandedOut(origin, master, device));
  if (master.is_cpu()) record->master_fingerprint_ = fingerprint(master.const_data_ptr(), master.nbytes());
  record->own_ = master.to(record->options_, /*non_blocking=*/false, /*copy=*/true);
  record->data_ = static_cast<std::byte*>(record->own_.data_ptr());
  return finish(std::move(record), master);
}

at::Tensor HandedOut::finish(std::unique_ptr<HandedOut> record, const at::Tensor& master) {
  const PlainTorch guard;
  HandedOut* const self = record.get();
  const at::Device device = self->options_.device();
  c10::Storage storage(c10::Storage::use_byte_size_t(), self->bytes_,
                       c10::DataPtr(self->data_, record.release(), &delete_record, device),
                       /*allocator=*/nullptr, /*resizable=*/false);
  const c10::DispatchKeySet keys(
      c10::computeDispatchKey(self->options_.dtype().toScalarType(), at::kStrided, device));
  at::Tensor tensor =
      at::detail::make_tensor<HandedOutImpl>(std::move(storage), keys, self->options_.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(master.sizes(), master.strides());
  self->version_ = tensor.unsafeGetTensorImpl()->version_counter();
  self->seen_version_ = self->version_.current_version();
  if (device.is_cpu()) self->seen_fingerprint_ = fingerprint(self->data_, self->bytes_);
  return tensor;
}

HandedOut* HandedOut::of(const c10::TensorImpl& tensor) noexcept {
  const c10::Storage& storage = tensor.unsafe_storage();
  return storage ? of(*storage.unsafeGetStorageImpl()) : nullptr;
}

HandedOut* HandedOut::of(const c10::StorageImpl& storage) noexcept {
  if (storage.data_ptr().get_deleter() != &delete_record) return nullptr;
  return static_cast<HandedOut*>(storage.data_ptr().get_context());
}

HandedOut::~HandedOut() {
  try {
    write_back();
  } catch (const std::exception& error) {
    TORCH_WARN("dynswap_ext: what was written on a handed-out tensor could not be taken to its master: ",
               error.what());
  }
}

void HandedOut::use_on(Stream consumer) {
  if (lease_) lease_.use_on(consumer);
}

bool HandedOut::master_unchanged() const {
  if (version_of(master_) != master_version_) return false;
  if (master_fingerprint_)
    return fingerprint(master_.const_data_ptr(), master_.nbytes()) == *master_fingerprint_;
  // Whether the file's pages were as the file has them cannot be told of a single weight any more.
  if (source_ == nullptr || !master_written_.any()) return true;
  SilentWrites written = master_written_;
  return !written.look(*source_);
}

at::Tensor HandedOut::view() const {
  return at::from_blob(data_, {static_cast<std::int64_t>(bytes_ / options_.dtype().itemsize())}, options_);
}

bool HandedOut::written() const {
  if (version_.current_version() != seen_version_) return true;
  // `.data` hands out a tensor with a version counter of its own; the bytes tell, where reading them is
  // cheap.
  return options_.device().is_cpu() && fingerprint(data_, bytes_) != seen_fingerprint_;
}

std::optional<std::uint32_t> HandedOut::write_back() {
  if ((!compare_bytes_ && !written()) || !master_unchanged()) return std::nullopt;
  const PlainTorch guard;
  // The master is dense: its bytes, in memory order, are those of the device copy.
  const at::Tensor flat = master_.as_strided({master_.numel()}, {1}, master_.storage_offset());
  const at::Tensor device = view();
  if (compare_bytes_) {
    const at::Tensor now = device.view(at::kByte).cpu();
    const at::Tensor then = flat.to(options_.dtype()).view(at::kByte);
    if (at::equal(now, then)) return std::nullopt;
  }
  flat.copy_(device);
  master_.unsafeGetTensorImpl()->bump_version();
  master_version_ = version_of(master_);
  if (source_) master_written_.look(*source_);
  if (master_fingerprint_) master_fingerprint_ = fingerprint(master_.const_data_ptr(), master_.nbytes());
  seen_version_ = version_.current_version();
  if (options_.device().is_cpu()) seen_fingerprint_ = fingerprint(data_, bytes_);
  return master_version_;
}

}  // namespace dynswap
