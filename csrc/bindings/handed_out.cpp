#include "bindings/handed_out.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "accelerator/plain_torch.h"
#include "bindings/glue.h"
#include "bindings/weight.h"
#include "bindings/written_buffers.h"
#include "core/protection.h"

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
/// therefore knows: from then on the bytes are compared with the master's, all of them, whenever masters are
/// asked for, at the next access, and when the storage dies. A later access gives the same bytes for as long
/// as such an alias lives (else its writes would go where nobody looks). detach() and what autograd saves
/// share the counter, and cost nothing. What this does not see is `.data` of a *view*, whose implementation
/// is torch's own: on the CPU a sample of the bytes finds it if it changes more than a part.
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

  /// `.data = t` would give the tensor of a forward other bytes and the master none: that is refused, as it
  /// would be lost. (Outside a forward there is an alias, dynswap_ext/_swap/parameter_proxy.py, which knows
  /// the master.)
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>&) override {
    throw std::runtime_error(
        "`.data = t` on a weight of an installed model, inside a forward, would be lost: the tensor is the "
        "forward's own. Write in place (`.data.copy_(t)`), or assign outside the forward");
  }

 private:
  /// The tensor's own counter has two owners at least: the tensor and its record.
  void note(const c10::VariableVersion& version) const noexcept {
    HandedOut* const record = version.unique() ? HandedOut::of(*this) : nullptr;
    if (record != nullptr && PROTECTED(untracked_alias_noted)) record->note_untracked_alias();
  }
};

/// Its object is kept out of the C library's heap: Note [Small blocks pin large holes].
struct HandedOutStorage final : c10::StorageImpl, OutsideTheHeap {
  using c10::StorageImpl::StorageImpl;
};

/// The elements in memory order; of a tensor with gaps, those of a copy without.
at::Tensor in_order(const at::Tensor& tensor) {
  at::Tensor whole = tensor;
  if (!tensor.is_non_overlapping_and_dense())
    whole = at::empty_strided(tensor.sizes(), strides_of_copy(tensor), tensor.options()).copy_(tensor);
  return whole.as_strided({whole.numel()}, {1}, whole.storage_offset());
}

/// A copy of a master. Small ones are staged, so that nobody waits for them to have been read.
at::Tensor copied_to(const at::TensorOptions& options, const at::Tensor& master) {
  constexpr std::size_t kSmall = 1u << 20;
  const bool staged = !options.device().is_cpu() && master.is_cpu() && master.nbytes() <= kSmall;
  const at::TensorOptions first = staged ? options.device(at::kCPU).pinned_memory(true) : options;
  const at::Tensor copy = at::empty_strided(master.sizes(), strides_of_copy(master), first).copy_(master);
  return staged ? copy.to(options, /*non_blocking=*/true) : copy;
}

/// Where masters overlap, larger ones are not put together by element: that takes a copy for each access, and
/// parameters that were tied by their data can be of any size.
constexpr std::size_t kMerged = 1u << 20;

/// The elements' bits, of which NaN equals itself and 0.0 is not -0.0.
at::Tensor bits_of(const at::Tensor& flat) {
  switch (flat.element_size()) {
    case 1:
      return flat.view(at::kByte);
    case 2:
      return flat.view(at::kShort);
    case 4:
      return flat.view(at::kInt);
    default:
      return flat.view(at::kLong);  // wider ones are two
  }
}

}  // namespace

HandedOut::HandedOut(const Origin& origin, const at::Tensor& master, const at::Device& device)
    : origin_(origin), options_(at::TensorOptions().dtype(origin.weight->wanted).device(device)) {
  const Weight& weight = *origin.weight;
  const bool known = weight.state.same_bytes(*master.unsafeGetTensorImpl());
  mapped_ = known ? weight.mapped : is_mapped(master, mappings_of(master));
  if (known) sharing_ = weight.sharing;
  if (weight.watch && known) {
    master_watch_ = weight.watch;
    master_writes_ = weight.writes_seen;
  } else if (copyable(master)) {
    master_watch_ = watch_of(master, mapped_);
    master_writes_ = master_watch_->writes();
  }
  master_ = alias_of(master);
  master_memory_ = memory_of(*master_.unsafeGetTensorImpl()).second;
  if (known) {
    master_version_ = weight.state.version;
    master_ours_ = weight.ours_seen;
  } else {
    note_master();
  }
  bytes_ = static_cast<std::size_t>(master.numel()) * options_.dtype().itemsize();
  if (sharing_ && sharing_->overlaps() && bytes_ <= kMerged) {
    const PlainTorch guard;
    before_ = in_order(readable_master()).clone();
  }
}

/// Its version is known.
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
  return mapped_ && copyable(master_) ? read_master(master_, origin_.weight->name) : master_;
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

at::Tensor HandedOut::make_private(const Origin& origin, const at::Tensor& master, const at::Device& device) {
  const PlainTorch guard;
  std::unique_ptr<HandedOut> record(new HandedOut(origin, master, device));
  record->own_ = copied_to(record->options_, record->readable_master());
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

/// Note [A watch outlives its tensor]
/// To start and end the kernel's watch of a weight's pages takes as long as looking at them ten times, and a
/// small weight's bytes are hashed when a watch begins. A program that reads `module.weight` in a loop would
/// pay for that each time. So a watch that has seen no write is left with the engine's copy (Note [What a
/// lease leaves]), and the next tensor over these bytes takes it up again. In between no tensor has the
/// bytes, so there is no write to look for. A read in a forward does not take it up, and the watch ends.
void HandedOut::leave_watch() noexcept {
  if (watch_ && seen_writes_ == 0) lease_.release(std::move(watch_));
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
    const std::lock_guard lock(mutex_);
    made.record(users_.front());
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
  const std::lock_guard lock(mutex_);
  if (std::find(users_.begin(), users_.end(), stream) != users_.end()) return false;
  users_.push_back(stream);
  return true;
}

bool HandedOut::wait_for_users() {
  if (options_.device().is_cpu()) return true;
  const c10::Stream here = torch_stream(options_.device());
  std::vector<c10::Stream> users;
  {
    const std::lock_guard lock(mutex_);
    users = users_;
  }
  if (capturing(here) ||
      std::any_of(users.begin(), users.end(), [](const c10::Stream& user) { return capturing(user); })) {
    return false;
  }
  for (const c10::Stream& user : users) {
    if (user == here || !PROTECTED(written_before_read)) continue;
    c10::Event written(here.device_type());
    written.record(user);
    written.block(here);
  }
  return true;
}

bool HandedOut::master_unchanged() const {
  if (memory_of(*master_.unsafeGetTensorImpl()).second != master_memory_) return false;
  if (version_of(master_) != master_version_ &&
      (!sharing_ ||
       !sharing_->if_of_others({master_version_, master_ours_}, master_watch_.get(), master_writes_)))
    return false;
  return !master_watch_ || master_watch_->writes() == master_writes_;
}

at::Tensor HandedOut::view() const {
  return at::from_blob(data_, {static_cast<std::int64_t>(bytes_ / options_.dtype().itemsize())}, options_);
}

bool HandedOut::written() const {
  if (version_.current_version() != seen_version_) return true;
  if (watch_) return watch_->writes() != seen_writes_;
  // `.data` of a view is not noted (Note [Writes without a trace]): on the CPU a few of the bytes tell of
  // most such writes.
  return options_.device().is_cpu() && sampled_hash(data_, bytes_) != seen_sample_;
}

void HandedOut::note_equal() {
  seen_version_ = version_.current_version();
  if (watch_) {
    seen_writes_ = watch_->writes();
  } else if (options_.device().is_cpu()) {
    seen_sample_ = sampled_hash(data_, bytes_);
  }
}

void HandedOut::watch_bytes() {
  if (!watch_ && !untracked_ && options_.device().is_cpu()) begin_watch(written());
}

void HandedOut::begin_watch(bool is_written) {
  if (!options_.device().is_cpu() || bytes_ == 0) return;
  watch_ = std::static_pointer_cast<MemoryWatch>(lease_.take_left());
  if (!watch_) {
    watch_ = MemoryWatch::of_private(data_, bytes_);  // the engine's memory, or torch's own
    if (!watch_->exact()) {
      watch_ = nullptr;
      untracked_ = true;
    }
  }
  seen_writes_ = is_written ? ~std::uint64_t{0} : 0;
}

bool HandedOut::start_write_back() {
  if (!(watched() || untracked_ || written()) || !master_unchanged() || !wait_for_users()) return false;
  const PlainTorch guard;
  const at::Tensor device = view();
  sent_ = at::empty(device.sizes(), options_.device(at::kCPU).pinned_memory(true));
  sent_.copy_(device, /*non_blocking=*/true);
  arrived_ = false;
  return true;
}

at::Tensor HandedOut::on_host() {
  if (!std::exchange(arrived_, false)) return view().cpu();
  return std::move(sent_);
}

std::optional<std::uint32_t> HandedOut::write_back(bool look) {
  look = look || watched() || untracked_;
  if (!look && !written()) return std::nullopt;
  const bool unchanged = !PROTECTED(master_wins) || master_unchanged();
  if (!unchanged && !before_.defined()) return std::nullopt;
  postponed_ = !wait_for_users();
  if (postponed_) return std::nullopt;
  const PlainTorch guard;
  // A dense master's elements, in memory order, are those of its copy; so are those of a dense copy of any
  // other.
  const bool dense = master_.is_non_overlapping_and_dense();
  const at::Tensor flat = in_order(readable_master());
  const bool cast = flat.scalar_type() != options_.dtype().toScalarType();
  if (!cast && !look && !before_.defined()) {
    flat.copy_(view());
  } else {
    const at::Tensor now = on_host();
    const at::Tensor differs = written_elements(now, flat);
    if (!differs.any().item<bool>()) {
      note_equal();
      return std::nullopt;
    }
    // Elements that were not written keep the master's precision.
    const at::Tensor bits = bits_of(flat);
    bits.copy_(at::where(differs, bits_of(now.to(flat.scalar_type())), bits));
    if (before_.defined()) note_before(now, flat);
  }
  if (mapped_ && dense) {
    write_master(master_, flat, origin_.weight->name);
  } else if (mapped_ || !dense) {
    master_.copy_(flat.as_strided(master_.sizes(), strides_of_copy(master_), flat.storage_offset()));
  }
  if (sharing_) {
    sharing_->bump();
  } else if (master_.unsafeGetTensorImpl()->version_counter().enabled()) {  // an inference tensor has none
    master_.unsafeGetTensorImpl()->bump_version();
  }
  rounded_ = rounded_ || cast;
  note_master();
  if (master_watch_) master_writes_ = master_watch_->writes();
  note_equal();
  if (!unchanged) return std::nullopt;  // some elements are the master's, which the tensor does not have
  return master_version_;
}

/// Which elements of the copy were written since it was handed out, and not those of the master that were
/// written by others meanwhile. `now` is the copy, `flat` the master.
at::Tensor HandedOut::written_elements(const at::Tensor& now, const at::Tensor& flat) const {
  const at::Tensor& handed_out = before_.defined() ? before_ : flat;
  at::Tensor written = bits_of(now).ne(bits_of(handed_out.to(now.scalar_type())));
  if (before_.defined()) written.logical_and_(bits_of(flat).eq(bits_of(before_)));
  return written;
}

/// Notes what counts as handed out from now on: what the tensor has, in the master's precision where they are
/// equal.
void HandedOut::note_before(const at::Tensor& now, const at::Tensor& flat) {
  const at::Tensor differs = bits_of(now).ne(bits_of(flat.to(now.scalar_type())));
  const at::Tensor copied = now.to(flat.scalar_type());
  bits_of(before_).copy_(at::where(differs, bits_of(copied), bits_of(flat)));
}

}  // namespace dynswap
