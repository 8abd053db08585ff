#include "session/offload.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "accelerator/capabilities.h"
#include "accelerator/pinned_memory.h"
#include "accelerator/plain_torch.h"
#include "accelerator/torch_calls.h"
#include "accelerator/torch_stream.h"
#include "core/check.h"
#include "io/file.h"
#include "session/session.h"
#include "tensor/handed_out.h"
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

/// Whether two handles are of one version counter.
bool same_counter(const c10::VariableVersion& one, const c10::VariableVersion& other) noexcept {
  static_assert(sizeof one == sizeof(void*), "a handle is a pointer to the counter");
  return std::memcmp(&one, &other, sizeof one) == 0;
}

void end_lease(void* lease) { delete static_cast<Lease*>(lease); }

}  // namespace

/// A storage that the graph has, wherever its bytes are.
struct OffloadedStorage {
  explicit OffloadedStorage(std::shared_ptr<SavedOffload> of) : offload(std::move(of)) {}
  ~OffloadedStorage() { offload->gone(*this); }
  OffloadedStorage(const OffloadedStorage&) = delete;
  OffloadedStorage& operator=(const OffloadedStorage&) = delete;

  /// Whether its bytes are those that a view shows now.
  bool has_bytes_of(const c10::VariableVersion& version) const;
  void add(const c10::VariableVersion& version) {
    for (const auto& known : versions) {
      if (same_counter(known.first, version)) return;
    }
    versions.emplace_back(version, version.current_version());
  }
  void note_versions();
  c10::Storage bring(std::thread::id reader);
  c10::Storage from_engine(std::thread::id reader);
  c10::Storage without_engine();

  const std::shared_ptr<SavedOffload> offload;
  std::shared_ptr<Engine> engine;
  WeightId id = 0;
  const c10::StorageImpl* identity = nullptr;
  c10::weak_intrusive_ptr<c10::StorageImpl> original{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::intrusive_ptr<c10::StorageImpl> held;  ///< null once it has left
  std::size_t bytes = 0, index = 0;
  SourcePtr host;  ///< null: it has not left
  EventPtr written;
  /// Version counters of the views that are saved, and their values as the storage left.
  std::vector<std::pair<c10::VariableVersion, std::uint32_t>> versions;
  bool departing = false;               ///< a copy to the host may be under way
  bool passed = false;                  ///< backward has come to it
  std::size_t views = 0, unpacked = 0;  ///< how many stand in graphs, and have been asked for
  c10::Storage back;                    ///< what came back, until each view has been unpacked
};

/// What stands in the graph for one view of it.
struct SavedView final : Saved {
  SavedView(std::shared_ptr<OffloadedStorage> of, const at::Tensor& tensor)
      : storage(std::move(of)),
        like(tensor.options()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        offset(tensor.storage_offset()),
        conjugate(tensor.is_conj()),
        negative(tensor.is_neg()),
        version(tensor.unsafeGetTensorImpl()->version_counter()),
        saved_version(version_of(tensor)) {
    ++storage->views;
  }
  ~SavedView() override {
    --storage->views;
    storage->unpacked -= unpacked ? 1 : 0;
  }

  at::Tensor unpack() override {
    if (const std::uint32_t now = version.current_version(); now != saved_version) {
      const PlainTorch guard;
      refuse_if_written(saved_version, now, at::empty({0}, like), sizes);
    }
    const c10::Storage bytes = storage->bring(reader);
    const PlainTorch guard;
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(bytes), c10::DispatchKeySet(like.computeDispatchKey()), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    if (conjugate) made._set_conj(true);
    if (negative) made._set_neg(true);
    if (!std::exchange(unpacked, true)) ++storage->unpacked;
    if (storage->unpacked >= storage->views) storage->back = c10::Storage();
    return made;
  }

  const std::shared_ptr<OffloadedStorage> storage;
  const at::TensorOptions like;
  const std::vector<std::int64_t> sizes, strides;
  const std::int64_t offset;
  const bool conjugate, negative;
  const c10::VariableVersion version;
  const std::uint32_t saved_version;
  const std::thread::id reader = std::this_thread::get_id();  ///< whose order backward takes up
  bool unpacked = false;
};

bool OffloadedStorage::has_bytes_of(const c10::VariableVersion& version) const {
  if (held) return true;
  return std::any_of(versions.begin(), versions.end(), [&](const auto& known) {
    return same_counter(known.first, version) && known.second == version.current_version();
  });
}

void OffloadedStorage::note_versions() {
  for (auto& [version, value] : versions) value = version.current_version();
}

c10::Storage OffloadedStorage::bring(std::thread::id reader) {
  offload->let_go_of_arrived();
  const bool first = !std::exchange(passed, true);
  c10::intrusive_ptr<c10::StorageImpl> there = held ? held : original.lock();
  if (there) {
    if (!held && !departing && first && !back) {
      // Somebody else has it.
      if (offload->of_others_.size() <= index) offload->of_others_.resize(index + 1, 0);
      offload->of_others_[index] = bytes;
    }
    if (first) {
      const std::shared_ptr<Engine> serving = engine;
      const py::gil_scoped_release release;
      serving->pass_by(id, {.thread = reader});
    }
    return c10::Storage(std::move(there));
  }
  if (!back) {
    c10::Storage brought = from_engine(reader);
    if (!brought) {
      brought = without_engine();
      offload->figures_.in_bytes += bytes;
    }
    if (!back) back = std::move(brought);
  }
  return back;
}

/// None if the engine has ended.
c10::Storage OffloadedStorage::from_engine(std::thread::id reader) {
  const at::Device device = offload->device_;
  const Stream consumer = current_stream(device);
  const std::shared_ptr<Engine> serving = engine;
  auto lease = std::make_unique<Lease>();
  try {
    const py::gil_scoped_release release;
    *lease = serving->acquire(id, consumer, {.thread = reader});
  } catch (const ClosedError&) {
    return {};
  }
  std::byte* const data = lease->data();
  return {c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, lease.release(), &end_lease, device),
          /*allocator=*/nullptr, /*resizable=*/false};
}

c10::Storage OffloadedStorage::without_engine() {
  engine->synchronise(written);
  const PlainTorch guard;
  const auto size = static_cast<std::int64_t>(bytes);
  at::Tensor on_host;
  if (host->file) {
    on_host = at::empty({size}, at::kByte);
    host->file->read(host->offset, static_cast<std::byte*>(on_host.data_ptr()), bytes, host->name, host->keep,
                     ReadMode::quick);
  } else {
    on_host = at::from_blob(const_cast<std::byte*>(host->address), {size}, at::kByte);
  }
  return on_host.to(offload->device_, at::kByte, /*non_blocking=*/false, /*copy=*/true).storage();
}

SavedOffload::SavedOffload(const at::Device& device, std::size_t limit, const std::string& folder)
    : device_(device),
      limit_(limit),
      least_(std::min(kLeastBytes, limit / kLeastPart)),
      folder_(folder),
      pinned_(!device.is_cpu() && has_pinned_memory(device)) {
  if (!device.is_cpu()) out_ = copy_stream(device);
}

SavedOffload::~SavedOffload() {
  for (const Departing& each : departing_) each.engine->synchronise(each.written);
}

bool SavedOffload::can_leave(const at::Tensor& tensor) const {
  if (!has_own_bytes(tensor) || tensor.device() != device_ || tensor.is_quantized()) return false;
  const c10::StorageImpl& storage = *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage.nbytes() <= least_ || HandedOut::of(storage) != nullptr) return false;
  if (storage.data_ptr().get_deleter() == &end_lease) return false;
  const at::Tensor base = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  if (base.is_leaf() && base.requires_grad()) return false;
  return Session::serving(base).second == nullptr;
}

std::unique_ptr<Saved> SavedOffload::keep(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor) {
  if (!can_leave(tensor) || capturing(device_)) return nullptr;
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
  if (index < of_others_.size() && of_others_[index] != 0) {
    if (of_others_[index] == bytes) return nullptr;
    of_others_[index] = 0;  // another step
  }
  const std::optional<WeightId> id = engine->take_short_lived();
  if (!id) return nullptr;
  const auto made = std::make_shared<OffloadedStorage>(shared_from_this());
  made->engine = engine;
  engine_ = engine;
  made->id = *id;
  made->identity = identity;
  made->original = storage.getWeakStorageImpl();
  made->held = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl());
  made->bytes = bytes;
  made->index = index;
  made->add(version);
  ++alive_;
  known_[identity] = made;
  here_.push_back(made);
  saved_in_step_ += bytes;
  held_bytes_ += bytes;
  note_bytes();

  const Stream consumer = current_stream(device_);
  one_stream_ = one_stream_ && saved_on_.value_or(consumer) == consumer;
  saved_on_ = consumer;
  auto saved = std::make_unique<SavedView>(made, tensor);
  make_room(consumer);
  return saved;
}

/// A quarter of the limit is for what is on its way out.
void SavedOffload::make_room(Stream consumer) {
  let_go_of_arrived();
  const std::size_t stays = limit_ - limit_ / 4;
  const auto too_much = [&] {
    if (last_step_ && *last_step_ > limit_ && left_in_step_ + stays < *last_step_) return true;
    return held_bytes_ > (last_step_ && *last_step_ <= limit_ ? limit_ : stays);
  };
  while (!here_.empty() && too_much()) {
    const std::shared_ptr<OffloadedStorage> oldest = here_.front().lock();
    here_.pop_front();
    if (!oldest || !oldest->held) continue;
    leave(oldest, consumer);
    while (departing_.size() > 1 && departing_bytes_ > limit_ / 4) let_go(consumer);
  }
}

void SavedOffload::leave(const std::shared_ptr<OffloadedStorage>& storage, Stream consumer) {
  auto source = std::make_shared<Source>();
  source->name = "a tensor saved for backward";
  source->count = storage->bytes;
  source->keep = Keep::no;
  const c10::intrusive_ptr<c10::StorageImpl> bytes = storage->held;
  storage->note_versions();
  if (device_.is_cpu()) {
    if (!file_) file_ = std::make_shared<ScratchFile>(folder_);
    const auto file = file_->file();
    const auto range = file_->take(storage->bytes);
    source->file = file;
    source->offset = range->offset;
    source->owner = range;
    const py::gil_scoped_release release;
    file->write(range->offset, static_cast<const std::byte*>(bytes->data()), storage->bytes);
  } else {
    const std::shared_ptr<std::byte> host = staging_memory(device_, pinned_, storage->bytes);
    source->address = host.get();
    source->owner = host;
    source->pinned = pinned_;
    const Stream out = handle_of(*out_);
    storage->engine->wait(out, storage->engine->record(consumer));
    torch_calls([&] {
      const PlainTorch guard;
      const c10::StreamGuard on_out(*out_);
      at::from_blob(host.get(), {static_cast<std::int64_t>(storage->bytes)}, at::kByte)
          .copy_(bytes_of(c10::Storage(bytes)), /*non_blocking=*/pinned_);
    });
    storage->written = storage->engine->record(out);
    departing_.push_back({bytes, host, storage->engine, storage->written, storage});
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

/// Takes what leaves longest from the list. From now on the engine brings it back: as long as its memory is
/// there, nothing has to.
SavedOffload::Departing SavedOffload::take_oldest_departing() {
  Departing oldest = std::move(departing_.front());
  departing_.pop_front();
  departing_bytes_ -= oldest.storage->nbytes();
  if (const auto storage = oldest.of.lock()) {
    storage->departing = false;
    storage->engine->offer(storage->id, storage->host, oldest.written);
  }
  note_bytes();
  return oldest;
}

/// Lets go of the memory that leaves longest, in the order of the consumer's stream.
void SavedOffload::let_go(Stream consumer) {
  const Departing oldest = take_oldest_departing();
  if (one_stream_) {
    oldest.engine->wait(consumer, oldest.written);
  } else {
    const py::gil_scoped_release release;
    oldest.engine->synchronise(oldest.written);
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
  if (storage.held) held_bytes_ -= storage.bytes;
  if (const auto found = known_.find(storage.identity); found != known_.end() && found->second.expired())
    known_.erase(found);
  if (--alive_ == 0) {
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
