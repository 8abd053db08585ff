// HandedOut: tensors over leased bytes, and the streams that use them.
#include "tensor/handed_out.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "accelerator/plain_torch.h"
#include "accelerator/torch_stream.h"
#include "core/protection.h"
#include "tensor/master_memory.h"
#include "tensor/master_record.h"
#include "tensor/server.h"
#include "tensor/written_buffers.h"

namespace dynswap {

namespace {

void delete_record(void* context) {
  std::unique_ptr<HandedOut> record(static_cast<HandedOut*>(context));
  keep_until_the_call_ends(record);
}

/// Note [Writes without a trace]
/// What is written in place on a handed-out tensor, or on a view of it, bumps the version counter that they
/// share, and that tells whether there is something to take to the master. `.data` (torch's variable_data(),
/// in C++ too) makes an alias whose counter is its own. It asks the tensor's implementation for it, which
/// therefore knows the alias's counter, which tells of what torch writes on the alias or a view of it.
/// Others' kernels bump none: from then on the bytes are compared with the master's, all of them, whenever
/// masters are asked for, at the next access, and when the storage dies. A later access gives the same bytes
/// for as long as such an alias lives (else its writes would go where nobody looks). detach() and what
/// autograd saves share the counter, and cost nothing. What this does not see is `.data` of a *view*, whose
/// implementation is torch's own: on the CPU a sample of the bytes finds it if it changes more than a part.
class HandedOutImpl final : public c10::TensorImpl, public OutsideTheHeap {
 public:
  using c10::TensorImpl::TensorImpl;

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                              bool allow_metadata_change) const override {
    note(version);
    return c10::TensorImpl::shallow_copy_and_detach(version, allow_metadata_change);
  }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                              bool allow_metadata_change) const override {
    note(version);
    return c10::TensorImpl::shallow_copy_and_detach(std::move(version), allow_metadata_change);
  }

  /// `.data = t`: see Note [Data given inside a forward].
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& data) override {
    HandedOut* const record = HandedOut::of(*this);
    if (record == nullptr || given_) return c10::TensorImpl::shallow_copy_from(data);
    if (shows_the_same(*data)) return;  // `w.data -= t` has written them in place
    given_ = true;
    const auto end = [](bool* given) { *given = false; };
    const std::unique_ptr<bool, decltype(end)> giving(&given_, end);
    const at::Tensor self = at::Tensor::wrap_tensor_impl(
        c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(this));
    const std::shared_ptr<Server> server = record->origin().server.lock();
    const auto assign = [&] { c10::TensorImpl::shallow_copy_from(data); };
    if (server != nullptr && server->give_data(*record, self, at::Tensor::wrap_tensor_impl(data), assign))
      return;
    throw std::runtime_error(
        "`.data = t` on a tensor that was handed out of an installed model would be lost: no module has its "
        "weight any more, or it is a part of one. Write in place (`.data.copy_(t)`)");
  }

 private:
  /// The tensor's own counter has two owners at least: the tensor and its record.
  void note(const c10::VariableVersion& version) const {
    HandedOut* const record = version.unique() ? HandedOut::of(*this) : nullptr;
    if (record == nullptr || !PROTECTED(untracked_alias_noted)) return;
    record->note_version_of_alias(version);
    record->note_untracked_alias();
  }

  bool shows_the_same(const c10::TensorImpl& other) const {
    return has_layout(other) && other.storage() && other.storage().data() == storage().data() &&
           other.storage_offset() == storage_offset() && other.dtype() == dtype() &&
           other.sizes() == sizes() && other.strides() == strides();
  }

  bool given_ = false;  ///< it is being given other bytes
};

/// The storage of a handed-out tensor. Its object is kept out of the C library's heap: Note [Small blocks pin
/// large holes].
struct HandedOutStorage final : c10::StorageImpl, OutsideTheHeap {
  using c10::StorageImpl::StorageImpl;
};

/// A copy of a master. Small ones are staged, so that nobody waits for them to have been read.
at::Tensor copied_to(const at::TensorOptions& options, const at::Tensor& master) {
  constexpr std::size_t kSmall = 1u << 20;
  const bool staged = !options.device().is_cpu() && master.is_cpu() && master.nbytes() <= kSmall;
  const at::TensorOptions first = staged ? options.device(at::kCPU).pinned_memory(true) : options;
  const KeptLocked kept(master, first.device());
  const at::Tensor copy = at::empty_strided(master.sizes(), strides_of_copy(master), first).copy_(master);
  return staged ? copy.to(options, /*non_blocking=*/true) : copy;
}

/// Where masters overlap, those of which the copy is larger are not put together by element: that takes a
/// copy for each access, and parameters that were tied by their data can be of any size.
constexpr std::size_t kMerged = 1u << 20;

}  // namespace

HandedOut::HandedOut(const Origin& origin, const at::Tensor& master, const at::Device& device)
    : origin_(origin), options_(at::TensorOptions().dtype(origin.master->wanted).device(device)) {
  const MasterRecord& of = *origin.master;
  const bool known = of.state.same_bytes(*master.unsafeGetTensorImpl());
  content_ = of.content ? of.content->with_bytes() : nullptr;
  if (!content_) mapped_ = known ? of.mapped : is_mapped(master, MappingsOfMasters().of(master));
  if (known) sharing_ = of.sharing;
  if (of.watch && known) {
    master_watch_ = of.watch;
    master_writes_ = of.writes_seen;
  } else if (!content_ && copyable(master)) {
    master_watch_ = watch_of(master, mapped_);
    master_writes_ = master_watch_->writes();
  }
  if (content_) {
    const PlainTorch guard;  // a class that dispatches to Python has a detach() of its own
    c10::TensorImpl* const impl = master.unsafeGetTensorImpl();
    master_ = at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), true));
  } else {
    master_ = alias_of(master);
  }
  master_memory_ = memory_of(*master_.unsafeGetTensorImpl()).second;
  if (known) {
    master_version_ = of.state.version;
    master_ours_ = of.ours_seen;
  } else {
    note_master();
  }
  bytes_ = static_cast<std::size_t>(master.numel()) * options_.dtype().itemsize();
  note_before_if_small();
}

void HandedOut::note_before_if_small() {
  if (!sharing_ || !sharing_->overlaps() || bytes_ > kMerged) return;
  const PlainTorch guard;
  before_ = master_in_order().clone();
}

/// Takes the master's present version as the one that was handed out.
void HandedOut::note_master() {
  if (sharing_) {
    const Sharing::Seen now = sharing_->now();
    master_version_ = now.version;
    master_ours_ = now.ours;
  } else {
    master_version_ = version_of(master_);
  }
}

/// The master, or a copy of one whose memory may be gone. Throws SourceError.
at::Tensor HandedOut::readable_master() const {
  if (content_) return content_->values();
  return mapped_ && copyable(master_) ? read_master(master_, origin_.master->name) : master_;
}

std::unique_ptr<HandedOut> HandedOut::of_weight(const Origin& origin, const at::Tensor& master,
                                                const at::Device& device) {
  return std::unique_ptr<HandedOut>(new HandedOut(origin, master, device));
}

at::Tensor HandedOut::make(std::unique_ptr<HandedOut> record, Lease lease) {
  return make(std::move(record), std::move(lease), /*earlier=*/nullptr, /*watched=*/false);
}

at::Tensor HandedOut::make(std::unique_ptr<HandedOut> record, Lease lease, const HandedOut* earlier,
                           bool watched) {
  if (earlier != nullptr && earlier->data_ == lease.data() && earlier->before_.defined() &&
      record->before_.defined())
    record->before_ = earlier->before_;
  record->data_ = lease.data();
  record->lease_ = std::move(lease);
  const at::Tensor master = record->master_;
  return finish(std::move(record), master, watched);
}

at::Tensor HandedOut::make_private(const Origin& origin, const at::Tensor& master, const at::Device& device,
                                   std::shared_ptr<void> counted) {
  const PlainTorch guard;
  std::unique_ptr<HandedOut> record(new HandedOut(origin, master, device));
  record->own_ = copied_to(record->options_, record->readable_master());
  record->counted_ = std::move(counted);
  record->data_ = static_cast<std::byte*>(record->own_.data_ptr());
  return finish(std::move(record), master);
}

at::Tensor HandedOut::finish(std::unique_ptr<HandedOut> record, const at::Tensor& master, bool watched) {
  HandedOut* const self = record.get();
  at::Tensor tensor = again(std::move(record), master);
  self->version_ = tensor.unsafeGetTensorImpl()->version_counter();
  if (watched) self->begin_watch(/*is_written=*/false);
  if (self->watch_) {
    self->seen_version_ = self->version_.current_version();
  } else {
    self->note_equal();
  }
  if (!self->options_.device().is_cpu()) self->note_user(torch_stream(self->options_.device()));
  return tensor;
}

at::Tensor HandedOut::tensor_over(c10::Storage storage, const HandedOut& record, const at::Tensor& master) {
  const PlainTorch guard;
  const caffe2::TypeMeta type = record.options_.dtype();
  const c10::DispatchKeySet keys(
      c10::computeDispatchKey(type.toScalarType(), at::kStrided, record.options_.device()));
  at::Tensor tensor = at::detail::make_tensor<HandedOutImpl>(std::move(storage), keys, type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(master.sizes(), strides_of_copy(master));
  return tensor;
}

at::Tensor HandedOut::again(c10::intrusive_ptr<c10::StorageImpl> storage, const at::Tensor& master) {
  const HandedOut& record = *of(*storage);
  at::Tensor tensor = tensor_over(c10::Storage(std::move(storage)), record, master);
  tensor.unsafeGetTensorImpl()->set_version_counter(record.version_);
  return tensor;
}

at::Tensor HandedOut::again(std::unique_ptr<HandedOut> record, const at::Tensor& master) {
  const HandedOut& self = *record;
  c10::DataPtr data(self.data_, record.get(), &delete_record, self.options_.device());
  static_cast<void>(record.release());
  c10::Storage storage(c10::make_intrusive<HandedOutStorage>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<std::int64_t>(self.bytes_)),
      std::move(data),
      /*allocator=*/nullptr, /*resizable=*/false));
  at::Tensor tensor = tensor_over(std::move(storage), self, master);
  if (self.version_.enabled()) tensor.unsafeGetTensorImpl()->set_version_counter(self.version_);
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
  if (!version_.enabled()) return;  // it has never been handed out
  try {
    if (!watched() && !untracked_ && !written()) {
      leave_watch();
      return;
    }
    if (PROTECTED(written_back)) write_back();
    if (postponed_) {
      TORCH_WARN(
          "dynswap_ext: what was written on a handed-out tensor is not taken to its master, since the tensor "
          "died while a CUDA graph was captured on a stream that used it");
    }
  } catch (const c10::Error& error) {
    TORCH_WARN("dynswap_ext: what was written on a handed-out tensor could not be taken to its master: ",
               error.what_without_backtrace());
  } catch (const std::exception& error) {
    TORCH_WARN("dynswap_ext: what was written on a handed-out tensor could not be taken to its master: ",
               error.what());
  }
}

void HandedOut::use_here() {
  if (options_.device().is_cpu()) {
    if (lease_) lease_.use_on(0);
    return;
  }
  const c10::Stream here = torch_stream(options_.device());
  const bool is_new = note_user(here);
  if (lease_) return lease_.use_on(handle_of(here));
  if (!is_new) return;
  c10::Event made(here.device_type());
  {
    Users& users = *users_;
    const std::lock_guard lock(users.mutex);
    made.record(users.streams.front());
  }
  made.block(here);
  c10::impl::VirtualGuardImpl(here.device_type()).recordDataPtrOnStream(own_.storage().data_ptr(), here);
}

void HandedOut::record_stream(const c10::Stream& stream) {
  if (!PROTECTED(record_stream_heard) || !note_user(stream)) return;
  if (lease_) return lease_.add_reader(handle_of(stream));
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(own_.storage().data_ptr(), stream);
}

bool HandedOut::note_user(const c10::Stream& stream) {
  Users& users = *users_;
  const std::lock_guard lock(users.mutex);
  if (std::find(users.streams.begin(), users.streams.end(), stream) != users.streams.end()) return false;
  users.streams.push_back(stream);
  return true;
}

}  // namespace dynswap
