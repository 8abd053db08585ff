// HandedOut: what was written on a handed-out tensor, and how it gets to the master.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "accelerator/device_runtime.h"
#include "accelerator/plain_torch.h"
#include "accelerator/torch_stream.h"
#include "core/protection.h"
#include "tensor/handed_out.h"
#include "tensor/master_record.h"
#include "tensor/server.h"
#include "transfer/device_errors.h"

namespace dynswap {

namespace {

/// The elements in memory order; where memory has anything else, those of a copy.
at::Tensor in_order(const at::Tensor& tensor) {
  at::Tensor whole = tensor;
  if (!lies_as_copy(tensor))
    whole = at::empty_strided(tensor.sizes(), strides_of_copy(tensor), tensor.options()).copy_(tensor);
  return whole.as_strided({whole.numel()}, {1}, whole.storage_offset());
}

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

Mutex aliases_mutex;

}  // namespace

void HandedOut::note_version_of_alias(const c10::VariableVersion& version) {
  if (!version.enabled()) return;
  const std::lock_guard lock(aliases_mutex);
  // Where it is the only owner, the alias and its views are gone.
  const auto gone = [](const Alias& alias) {
    return alias.version.unique() && alias.version.current_version() == alias.seen;
  };
  aliases_.erase(std::remove_if(aliases_.begin(), aliases_.end(), gone), aliases_.end());
  aliases_.push_back({version, version.current_version()});
  aliased_ = true;
}

bool HandedOut::alias_bumped() const noexcept {
  const std::lock_guard lock(aliases_mutex);
  return std::any_of(aliases_.begin(), aliases_.end(),
                     [](const Alias& alias) { return alias.version.current_version() != alias.seen; });
}

void HandedOut::note_versions() noexcept {
  seen_version_ = version_.current_version();
  if (!aliased_) return;
  const std::lock_guard lock(aliases_mutex);
  for (Alias& alias : aliases_) alias.seen = alias.version.current_version();
}

/// The master's elements, or those of a copy of it, as in_order() has them.
at::Tensor HandedOut::master_in_order() const { return in_order(readable_master()); }

bool HandedOut::master_unchanged() const {
  if (content_ && content_->became_plain()) return false;
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
  if (bumped()) return true;
  if (watch_) return watch_->writes() != seen_writes_;
  // `.data` of a view is not noted (Note [Writes without a trace]): on the CPU a few of the bytes tell of
  // most such writes.
  return options_.device().is_cpu() && sampled_hash(data_, bytes_) != seen_sample_;
}

void HandedOut::note_equal() {
  note_versions();
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

/// Note [A watch outlives its tensor]
/// To start and end the kernel's watch of a weight's pages takes as long as looking at them ten times, and a
/// small weight's bytes are hashed when a watch begins. A program that reads `module.weight` in a loop would
/// pay for that each time. So a watch that has seen no write is left with the engine's copy (Note [What a
/// lease leaves]), and the next tensor over these bytes takes it up again. In between no tensor has the
/// bytes, so there is no write to look for. A read in a forward does not take it up, and the watch ends.
void HandedOut::leave_watch() noexcept {
  if (watch_ && seen_writes_ == 0) lease_.release(std::move(watch_));
}

bool HandedOut::wait_for_users() {
  if (options_.device().is_cpu()) return true;
  const c10::Stream here = torch_stream(options_.device());
  std::vector<c10::Stream> users;
  {
    Users& known = *users_;
    const std::lock_guard lock(known.mutex);
    users = known.streams;
  }
  if (is_captured(here) ||
      std::any_of(users.begin(), users.end(), [](const c10::Stream& user) { return is_captured(user); })) {
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

bool HandedOut::start_write_back() {
  if (gone_ || !(watched() || untracked_ || written()) || !master_unchanged() || !wait_for_users())
    return false;
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
  if (gone_ || (!look && !written())) return std::nullopt;
  try {
    return take_to_master(look);
  } catch (const c10::AcceleratorError& error) {
    gone_ = ends_all_work(error.get_error_code());
    throw;
  }
}

std::optional<std::uint32_t> HandedOut::take_to_master(bool look) {
  const bool unchanged = !PROTECTED(master_wins) || master_unchanged();
  if (content_ && content_->became_plain() && !before_.defined()) {
    const PlainTorch guard;
    before_ = in_order(content_->coded_values());
  }
  if (!unchanged && !before_.defined()) {
    note_lost();
    return std::nullopt;
  }
  postponed_ = !wait_for_users();
  if (postponed_) return std::nullopt;
  const PlainTorch guard;
  const bool in_place = lies_as_copy(master_);
  const at::Tensor flat = master_in_order();
  const bool cast = flat.scalar_type() != options_.dtype().toScalarType();
  if (!cast && !look && !before_.defined() && !content_) {
    flat.copy_(view());
  } else {
    const at::Tensor now = on_host();
    at::Tensor differs = written_elements(now, flat);
    const at::Tensor bits = bits_of(flat), taken = bits_of(now.to(flat.scalar_type()));
    if (before_.defined()) {
      const at::Tensor by_others = bits.ne(bits_of(before_));
      if (differs.logical_and(by_others).logical_and_(taken.ne(bits)).any().item<bool>()) tell_lost();
      differs.logical_and_(by_others.logical_not_());
    }
    bool any = differs.any().item<bool>();
    if (any && cast) {
      rounded_ = true;
      // What the master rounds is in it by now: each further look would find it, and write the same again.
      any = differs.logical_and_(taken.ne(bits)).any().item<bool>();
    }
    if (!any) {
      note_equal();
      return std::nullopt;
    }
    // Elements that were not written keep the master's precision.
    bits.copy_(at::where(differs, taken, bits));
    if (content_ && content_->was_coded() && !before_.defined()) before_ = at::empty_like(flat);
    if (before_.defined()) note_before(now, flat);
  }
  if (content_) {
    content_->memory().copy_(
        flat.as_strided(master_.sizes(), strides_of_copy(master_), flat.storage_offset()));
  } else if (mapped_ && in_place) {
    write_master(master_, flat, origin_.master->name);
  } else if (mapped_ || !in_place) {
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

void HandedOut::follow_plain() {
  const auto coded = std::exchange(content_, origin_.master->content);  // goes after the change
  master_watch_ = origin_.master->watch;
  master_writes_ = origin_.master->writes_seen;
  before_ = at::Tensor();
  note_before_if_small();
}

/// Tells the server of a write that is lost: copy and master were both written since they were equal, and
/// cannot be put together. What left no trace on the copy is not told, as nobody can tell it from what the
/// master has got since.
void HandedOut::note_lost() {
  if (!written()) return;
  note_equal();
  tell_lost();
}

void HandedOut::tell_lost() const {
  if (const auto server = origin_.server.lock()) server->note_lost(origin_.master);
}

/// Which elements of the copy were written since it was handed out. `now` is the copy, `flat` the master.
at::Tensor HandedOut::written_elements(const at::Tensor& now, const at::Tensor& flat) const {
  const at::Tensor& handed_out = before_.defined() ? before_ : flat;
  return bits_of(now).ne(bits_of(handed_out.to(now.scalar_type())));
}

/// Notes what counts as handed out from now on: what the tensor has, in the master's precision where they are
/// equal.
void HandedOut::note_before(const at::Tensor& now, const at::Tensor& flat) {
  const at::Tensor differs = bits_of(now).ne(bits_of(flat.to(now.scalar_type())));
  const at::Tensor copied = now.to(flat.scalar_type());
  bits_of(before_).copy_(at::where(differs, bits_of(copied), bits_of(flat)));
}

}  // namespace dynswap
