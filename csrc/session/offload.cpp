#include "session/offload.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <utility>

#include "accelerator/capabilities.h"
#include "accelerator/pinned_memory.h"
#include "accelerator/plain_torch.h"
#include "accelerator/torch_calls.h"
#include "accelerator/torch_stream.h"
#include "core/check.h"
#include "core/host_memory.h"
#include "core/protection.h"
#include "io/file.h"
#include "session/offloaded_storage.h"
#include "session/session.h"
#include "tensor/handed_out.h"
#include "tensor/leased_storage.h"
#include "tensor/master.h"

namespace dynswap {

namespace {

/// Less is not worth a copy, nor is less than this part of the limit.
constexpr std::size_t kLeastBytes = 64u << 10, kLeastPart = 64;

/// The bytes of a storage, as a tensor.
at::Tensor bytes_of(c10::Storage storage) {
  const auto size = static_cast<std::int64_t>(storage.nbytes());
  const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
  made.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return made;
}

/// Whether it is an `nn.Parameter`, frozen or not.
bool is_parameter(const at::Tensor& tensor) {
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  const int found = object ? PyObject_IsInstance(object.ptr(), ParameterClass) : -1;
  if (found < 0) throw py::error_already_set();
  return found == 1;
}

}  // namespace

SavedOffload::SavedOffload(const at::Device& device, std::size_t limit, const std::string& folder,
                           bool page_locks, std::function<void(const std::string&)> warn)
    : device_(device),
      limit_(limit),
      least_(std::min(kLeastBytes, limit / kLeastPart)),
      folder_(folder),
      pinned_(!device.is_cpu() && page_locks && has_pinned_memory(device)),
      warn_(std::move(warn)) {
  if (!device.is_cpu()) out_ = copy_stream(device);
}

SavedOffload::~SavedOffload() {
  for (const Departing& each : departing_) each.engine->synchronise(each.written);
}

bool SavedOffload::can_leave(const at::Tensor& tensor) const {
  if (!has_own_bytes(tensor) || tensor.device() != device_ || tensor.is_quantized()) return false;
  const c10::StorageImpl& storage = *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage.nbytes() <= least_ || HandedOut::of(storage) != nullptr) return false;
  if (lease_of(storage) != nullptr) return false;
  const at::Tensor base = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  if (base.is_leaf() && is_parameter(base)) return false;
  return Session::serving(base).second == nullptr;
}

const char* SavedOffload::where() const noexcept { return file_ ? "file" : pinned_ ? "pinned RAM" : "RAM"; }

std::unique_ptr<Saved> SavedOffload::keep(std::shared_ptr<Engine> engine, const at::Tensor& tensor) {
  // What a backward computes again, it needs at once.
  if (torch::autograd::get_current_graph_task_id() != -1 || capturing(device_)) return nullptr;
  if (!can_leave(tensor)) return nullptr;
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const c10::StorageImpl* const identity = storage.unsafeGetStorageImpl();
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  if (!version.enabled()) return nullptr;
  if (const auto found = known_.find(identity); found != known_.end()) {
    const std::shared_ptr<OffloadedStorage> known = found->second.lock();
    if (known && !known->original.expired() && known->has_bytes_of(version)) {
      known->add(version);
      return std::make_unique<SavedView>(known, tensor);
    }
  }
  const std::size_t bytes = storage.nbytes(), index = index_++;
  if (index < held_elsewhere_.size() && held_elsewhere_[index] != bytes)
    held_elsewhere_[index] = 0;  // another step
  const std::optional<WeightId> id = engine->take_short_lived();
  if (!id) return nullptr;
  const auto made = std::make_shared<OffloadedStorage>(shared_from_this());
  engine_ = engine;
  made->engine = std::move(engine);
  made->id = *id;
  made->identity = identity;
  made->original = storage.getWeakStorageImpl();
  made->held = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl());
  made->bytes = bytes;
  made->index = index;
  made->held_elsewhere = index < held_elsewhere_.size() && held_elsewhere_[index] != 0;
  made->add(version);
  ++alive_;
  known_[identity] = made;
  if (made->held_elsewhere) return std::make_unique<SavedView>(made, tensor);
  here_.push_back(made);
  saved_in_step_ += bytes;
  held_bytes_ += bytes;
  note_bytes();

  auto saved = std::make_unique<SavedView>(made, tensor);
  make_room();
  return saved;
}

/// A quarter of the limit is for what is on its way out.
void SavedOffload::make_room() {
  let_go_of_arrived();
  while (!here_.empty() && here_.front().expired()) here_.pop_front();
  const std::size_t stays = limit_ - limit_ / 4;
  const auto too_much = [&] {
    if (last_step_ && *last_step_ > limit_ && left_in_step_ + stays < *last_step_) return true;
    return held_bytes_ > (last_step_ && *last_step_ <= limit_ ? limit_ : stays);
  };
  while (!here_.empty() && too_much()) {
    const std::shared_ptr<OffloadedStorage> oldest = here_.front().lock();
    here_.pop_front();
    if (!oldest || !oldest->held) continue;
    leave(oldest);
    while (departing_.size() > 1 && departing_bytes_ > limit_ / 4) let_go();
  }
}

/// Room for bytes on the host: see Note [Saved tensors leave the device].
std::shared_ptr<Source> SavedOffload::place_on_host(std::size_t bytes) {
  auto source = std::make_shared<Source>();
  source->name = "a tensor saved for backward";
  source->count = bytes;
  source->keep = Keep::no;
  // As torch's allocator takes it.
  auto charge = pinned_ ? HostMemory::charge(HostUse::activations, std::bit_ceil(bytes)) : nullptr;
  if (!charge && !folder_.empty()) {
    if (!file_) file_ = std::make_shared<ScratchFile>(folder_);
    const auto range = file_->take(bytes);
    source->file = file_->file();
    source->offset = range->offset;
    source->owner = range;
    return source;
  }
  if (!charge && !std::exchange(said_pageable_, true)) {
    const std::string why =
        pinned_ ? "host_budget= leaves no room for more that is" : "none is for '" + device_.str() + "' here";
    warn_("activations= copies what models save for backward to memory that is not page-locked, as " + why +
          ": each copy is waited for. Give activations_folder=, a folder on a fast disk" +
          (pinned_ ? ", or a larger host_budget" : ""));
  }
  const std::shared_ptr<std::byte> memory = staging_memory(device_, charge != nullptr, bytes);
  source->address = memory.get();
  source->pinned = charge != nullptr;
  source->owner =
      std::make_shared<const std::pair<std::shared_ptr<std::byte>, decltype(charge)>>(memory, charge);
  return source;
}

void SavedOffload::leave(const std::shared_ptr<OffloadedStorage>& storage) {
  const c10::intrusive_ptr<c10::StorageImpl> bytes = storage->held;
  if (bytes->nbytes() != storage->bytes) return;  // somebody resizes it, and brings its bytes back
  const std::shared_ptr<Source> source = place_on_host(storage->bytes);
  storage->note_versions();
  if (device_.is_cpu()) {
    storage->leaving = true;
    const py::gil_scoped_release release;
    source->file->write(source->offset, static_cast<const std::byte*>(bytes->data()), storage->bytes);
  } else {
    const bool pinned = source->file ? pinned_ : source->pinned;
    const std::shared_ptr<std::byte> host =
        source->file ? staging_memory(device_, pinned, storage->bytes)
                     : std::shared_ptr<std::byte>(source->owner, const_cast<std::byte*>(source->address));
    const Stream out = handle_of(*out_);
    storage->add_reader();  // it may have been used here since
    for (const c10::Stream stream : storage->streams) {
      if (PROTECTED(saved_after_compute))
        storage->engine->wait(out, storage->engine->record(handle_of(stream)));
    }
    const auto copy = [&] {
      torch_calls([&] {
        const PlainTorch guard;
        const c10::StreamGuard on_out(*out_);
        at::from_blob(host.get(), {static_cast<std::int64_t>(storage->bytes)}, at::kByte)
            .copy_(bytes_of(c10::Storage(bytes)), /*non_blocking=*/pinned);
      });
    };
    if (pinned) {
      copy();
    } else {
      storage->leaving = true;
      const py::gil_scoped_release release;
      copy();
    }
    storage->written = storage->engine->record(out);
    departing_.push_back(
        {bytes, storage->bytes, host, storage->engine, storage->written, storage->streams, storage});
    storage->departing = true;
    departing_bytes_ += storage->bytes;
  }
  storage->host = source;
  if (device_.is_cpu()) storage->engine->offer(storage->id, source, nullptr);
  left_in_step_ += storage->bytes;
  held_bytes_ -= storage->bytes;
  figures_.out_bytes += storage->bytes;
  storage->held.reset();
  note_bytes();
}

/// Takes what leaves longest from the list, and to its file, if it has one. From now on the engine brings it
/// back: as long as its memory is there, nothing has to.
SavedOffload::Departing SavedOffload::take_oldest_departing() {
  Departing oldest = std::move(departing_.front());
  departing_.pop_front();
  departing_bytes_ -= oldest.bytes;
  note_bytes();
  // Its allocator knows the stream that it was made on, and hears of others that read it.
  const c10::impl::VirtualGuardImpl allocator(device_.type());
  for (const c10::Stream stream : oldest.streams)
    allocator.recordDataPtrOnStream(oldest.storage->data_ptr(), stream);
  const auto storage = oldest.of.lock();
  if (!storage) return oldest;
  EventPtr written = oldest.written;
  if (const SourcePtr source = storage->host; source->file) {
    try {
      const py::gil_scoped_release release;
      oldest.engine->synchronise(oldest.written);
      source->file->write(source->offset, oldest.host.get(), storage->bytes);
    } catch (...) {  // it has not left
      storage->departing = false;
      storage->held = oldest.storage;
      held_bytes_ += storage->bytes;
      throw;
    }
    written = nullptr;
  }
  storage->departing = false;
  storage->engine->offer(storage->id, storage->host, std::move(written));
  return oldest;
}

/// Lets go of the memory that leaves longest, in the order of the streams that read it.
void SavedOffload::let_go() {
  const Departing oldest = take_oldest_departing();
  for (const c10::Stream stream : oldest.streams) {
    if (PROTECTED(saved_memory_held)) oldest.engine->wait(handle_of(stream), oldest.written);
  }
}

void SavedOffload::finish() noexcept {
  while (!departing_.empty()) {
    try {
      const Departing oldest = take_oldest_departing();
      const py::gil_scoped_release release;
      oldest.engine->synchronise(oldest.written);
    } catch (const std::exception&) {  // what its file does not take stays where it is
    }
  }
}

const OffloadedStorage* SavedOffload::newest(const c10::StorageImpl* storage) const {
  const auto found = known_.find(storage);
  return found != known_.end() ? found->second.lock().get() : nullptr;
}

void SavedOffload::note_shown(std::shared_ptr<at::Tensor>& kept_by, const at::Tensor& tensor,
                              std::size_t bytes) {
  kept_by = std::make_shared<at::Tensor>(tensor);
  shown_.emplace_back(kept_by, bytes);
  shown_bytes_ += bytes;
  while (shown_.size() > 1 && shown_bytes_ > limit_ / 4) {
    const auto [oldest, its_bytes] = std::move(shown_.front());
    shown_.pop_front();
    shown_bytes_ -= its_bytes;
    if (const auto alive = oldest.lock()) *alive = at::Tensor();
  }
}

void SavedOffload::let_go_of_arrived() {
  while (!departing_.empty() && (!departing_.front().written || departing_.front().written->done()))
    take_oldest_departing();
}

void SavedOffload::call_begins() noexcept {
  if (alive_ > 0) return;
  index_ = saved_in_step_ = left_in_step_ = 0;
  here_.clear();
}

/// The graph has it no more.
void SavedOffload::gone(OffloadedStorage& storage) noexcept {
  storage.engine->give_back_short_lived(storage.id);
  if (storage.held && !storage.held_elsewhere) held_bytes_ -= storage.bytes;
  if (const auto found = known_.find(storage.identity); found != known_.end() && found->second.expired())
    known_.erase(found);
  if (--alive_ == 0) {
    figures_.step_bytes = saved_in_step_;
    last_step_ = saved_in_step_;
    call_begins();
  }
  note_bytes();
}

void SavedOffload::note_bytes() noexcept {
  const std::size_t now = held_bytes_ + departing_bytes_;
  if (const auto engine = engine_.lock()) engine->note_kept(now);
  figures_.peak_bytes = std::max<std::uint64_t>(figures_.peak_bytes, now);
}

}  // namespace dynswap
