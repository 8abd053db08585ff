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
#include <chrono>
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

/// Memory that is counted as long as it lives.
std::shared_ptr<std::byte> counted(std::shared_ptr<std::byte> memory, std::shared_ptr<const void> charge) {
  std::byte* const begin = memory.get();
  const std::pair both(std::move(memory), std::move(charge));
  return {std::make_shared<const decltype(both)>(both), begin};
}

}  // namespace

SavedOffload::SavedOffload(const at::Device& device, std::size_t limit, const std::string& folder,
                           bool page_locks, Keep keep, std::function<void(const std::string&)> warn)
    : device_(device),
      limit_(limit),
      least_(std::min(kLeastBytes, limit / kLeastPart)),
      folder_(folder),
      pinned_(!device.is_cpu() && page_locks && has_pinned_memory(device)),
      keep_(keep),
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

const char* SavedOffload::where() const noexcept {
  return cached_file_ || direct_file_ ? "file" : pinned_ ? "pinned RAM" : "RAM";
}

std::unique_ptr<Saved> SavedOffload::keep(std::shared_ptr<Engine> engine, const at::Tensor& tensor) {
  // What a backward computes again, it needs at once.
  if (torch::autograd::get_current_graph_task_id() != -1 || capturing(device_)) return nullptr;
  if (failure_) {
    while (!buffered_.empty()) take_oldest_buffered();  // what else has failed is told with it
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
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

/// Page-locked memory, a file or pageable memory: Note [Saved tensors leave the device].
SavedOffload::Place SavedOffload::place_on_host(std::size_t bytes) {
  Place place;
  place.source = std::make_shared<Source>();
  Source& source = *place.source;
  source.name = "a tensor saved for backward";
  source.count = bytes;
  source.keep = Keep::no;
  const std::size_t taken = std::bit_ceil(bytes);  // by torch's allocator, if it is page-locked
  const auto charge = pinned_ ? HostMemory::charge(HostUse::activations, taken) : nullptr;
  if (!charge && !folder_.empty()) {
    const auto take = [&](std::shared_ptr<ScratchFile>& file, Keep keep) {
      if (!file || file->shared_with_child()) file = std::make_shared<ScratchFile>(folder_, keep);
      const auto range = file->take(bytes);
      if (!range) return false;
      source.file = file->file();
      source.offset = range->offset;
      source.owner = range;
      return true;
    };
    if (keep_ == Keep::no || !take(cached_file_, Keep::yes)) take(direct_file_, Keep::no);
    const bool exceeds = held_bytes_ + buffered_bytes_ + bytes > limit_;
    if (!out_ && (exceeds || !source.file->writes_directly())) return place;
    place.pinned = pinned_;
    const auto buffer = std::make_shared<HostMemory::Charge>(HostUse::staging);
    if (pinned_) buffer->must_grow(taken);
    place.copy = counted(staging_memory(device_, pinned_, bytes), buffer);
    return place;
  }
  if (!charge && !std::exchange(said_pageable_, true)) {
    const std::string why =
        pinned_ ? "host_budget= leaves no room for more that is" : "none is for '" + device_.str() + "' here";
    warn_("activations= copies what models save for backward to memory that is not page-locked, as " + why +
          ": each copy is waited for. Give activations_folder=, a folder on a fast disk" +
          (pinned_ ? ", or a larger host_budget" : ""));
  }
  source.pinned = place.pinned = charge != nullptr;
  place.copy = counted(staging_memory(device_, place.pinned, bytes), charge);
  source.address = place.copy.get();
  source.owner = place.copy;
  return place;
}

void SavedOffload::leave(const std::shared_ptr<OffloadedStorage>& storage) {
  const c10::intrusive_ptr<c10::StorageImpl> bytes = storage->held;
  if (bytes->nbytes() != storage->bytes) return;  // somebody resizes it, and brings its bytes back
  const Place place = place_on_host(storage->bytes);
  storage->note_versions();
  const std::shared_ptr<Engine> engine = storage->engine;
  if (out_) {
    storage->add_reader();  // it may have been used here since
    for (const c10::Stream stream : storage->streams) {
      if (PROTECTED(saved_after_compute)) engine->wait(handle_of(*out_), engine->record(handle_of(stream)));
    }
  }
  const Stream out = out_ ? handle_of(*out_) : Stream{};
  const EventPtr from = engine->mark(out);
  const auto copy = [&] {
    if (!place.copy) {
      const auto src = static_cast<const std::byte*>(bytes->data());
      place.source->file->write(place.source->offset, src, storage->bytes);
      return;
    }
    torch_calls([&] {
      const PlainTorch guard;
      const c10::OptionalStreamGuard on_out(out_);
      at::from_blob(place.copy.get(), {static_cast<std::int64_t>(storage->bytes)}, at::kByte)
          .copy_(bytes_of(c10::Storage(bytes)), /*non_blocking=*/place.pinned);
    });
  };
  if (place.pinned) {
    copy();
  } else {
    storage->leaving = true;
    const py::gil_scoped_release release;
    copy();
  }
  storage->written = engine->record(out);
  if (from) engine->note_copy_out(storage->id, from, engine->mark(out), storage->bytes);
  storage->host = place.source;
  storage->copy = place.copy;
  if (place.copy && place.source->file) {
    if (!writer_) writer_ = std::make_unique<FileWriter>();
    const EventPtr copied = PROTECTED(saved_written_after_copied) ? storage->written : nullptr;
    storage->write = writer_->write(place.source->file, place.source->offset, place.copy, storage->bytes,
                                    copied, place.source->owner);
    buffered_.push_back({storage, storage->write, engine, storage->written, storage->bytes});
    buffered_bytes_ += storage->bytes;
  }
  departing_.push_back({bytes, storage->bytes, engine, storage->written, storage->streams, storage});
  storage->departing = true;
  departing_bytes_ += storage->bytes;
  left_in_step_ += storage->bytes;
  held_bytes_ -= storage->bytes;
  figures_.out_bytes += storage->bytes;
  storage->held.reset();
  let_go_of_arrived();
  while (buffered_bytes_ > limit_ / 4 && buffered_.size() > 1) take_oldest_buffered();
  note_bytes();
}

/// Takes what has been leaving longest from the list. From now on the engine brings it back: as long as its
/// memory is there, nothing has to.
SavedOffload::Departing SavedOffload::take_oldest_departing() {
  Departing oldest = std::move(departing_.front());
  departing_.pop_front();
  departing_bytes_ -= oldest.bytes;
  note_bytes();
  // Its allocator knows the stream that it was made on, and hears of others that read it.
  const c10::impl::VirtualGuardImpl allocator(device_.type());
  for (const c10::Stream stream : oldest.streams)
    allocator.recordDataPtrOnStream(oldest.storage->data_ptr(), stream);
  if (const auto storage = oldest.of.lock()) {
    storage->departing = false;
    if (!storage->write) offer(*storage);
  }
  return oldest;
}

void SavedOffload::offer(OffloadedStorage& storage) {
  if (std::exchange(storage.offered, true)) return;
  if (storage.write && (!storage.write->done() || storage.write->error())) {
    storage.host->file = nullptr;
    storage.host->offset = 0;
    storage.host->address = storage.copy.get();
    storage.host->owner = storage.copy;
    storage.host->pinned = pinned_;
  }
  storage.write = nullptr;
  storage.copy = nullptr;
  storage.engine->offer(storage.id, storage.host, storage.written);
}

void SavedOffload::take_oldest_buffered() {
  const Buffered oldest = std::move(buffered_.front());
  buffered_.pop_front();
  buffered_bytes_ -= oldest.bytes;
  if (!oldest.write->done()) {
    const py::gil_scoped_release release;
    if (!oldest.write->wait(std::chrono::seconds(1))) {  // a device that fails may never copy
      oldest.engine->synchronise(oldest.copied);
      if (oldest.copied && !oldest.copied->done()) oldest.write->give_up();
      static_cast<void>(oldest.write->wait());
    }
  }
  if (const std::exception_ptr error = oldest.write->error()) failure_ = error;
  if (const auto storage = oldest.of.lock()) offer(*storage);
}

/// Lets go of the memory that has been leaving longest, in the order of the streams that read it.
void SavedOffload::let_go() {
  const Departing oldest = take_oldest_departing();
  for (const c10::Stream stream : oldest.streams) {
    if (PROTECTED(saved_memory_held)) oldest.engine->wait(handle_of(stream), oldest.written);
  }
}

void SavedOffload::finish() noexcept {
  while (!departing_.empty() || !buffered_.empty()) {
    try {
      if (departing_.empty()) {
        take_oldest_buffered();
        continue;
      }
      const Departing oldest = take_oldest_departing();
      const py::gil_scoped_release release;
      oldest.engine->synchronise(oldest.written);
    } catch (const std::exception&) {  // a device that fails keeps what it has
    }
  }
  writer_.reset();
  cached_file_.reset();
  direct_file_.reset();
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
  while (!buffered_.empty() && buffered_.front().write->done()) take_oldest_buffered();
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
  const std::size_t now = held_bytes_ + departing_bytes_ + (out_ ? 0 : buffered_bytes_);
  if (const auto engine = engine_.lock()) engine->note_kept(now);
  figures_.peak_bytes = std::max<std::uint64_t>(figures_.peak_bytes, now);
}

}  // namespace dynswap
