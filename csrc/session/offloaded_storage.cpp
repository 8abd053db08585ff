#include "session/offloaded_storage.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>

#include "accelerator/plain_torch.h"
#include "accelerator/torch_stream.h"
#include "core/check.h"
#include "core/protection.h"
#include "io/file.h"
#include "tensor/leased_storage.h"
#include "tensor/master.h"

namespace dynswap {

namespace {

/// Whether two handles are of one version counter.
bool same_counter(const c10::VariableVersion& one, const c10::VariableVersion& other) noexcept {
  static_assert(sizeof one == sizeof(void*), "a handle is a pointer to the counter");
  return std::memcmp(&one, &other, sizeof one) == 0;
}

}  // namespace

OffloadedStorage::~OffloadedStorage() { offload->gone(*this); }

void OffloadedStorage::add(const c10::VariableVersion& version) {
  add_reader();
  for (const auto& known : versions) {
    if (same_counter(known.first, version)) return;
  }
  versions.emplace_back(version, version.current_version());
}

void OffloadedStorage::add_reader() {
  if (offload->device_.is_cpu()) return;
  const c10::Stream here = torch_stream(offload->device_);
  if (std::find(streams.begin(), streams.end(), here) == streams.end()) streams.push_back(here);
}

bool OffloadedStorage::has_bytes_of(const c10::VariableVersion& version) const {
  if ((held && !leaving) || !PROTECTED(saved_copies_current)) return true;
  bool among_them = false;
  for (const auto& [counter, value] : versions) {
    if (counter.current_version() != value) return false;
    among_them = among_them || same_counter(counter, version);
  }
  return among_them;
}

void OffloadedStorage::note_versions() {
  for (auto& [version, value] : versions) value = version.current_version();
}

c10::Storage OffloadedStorage::bring(std::thread::id reader) {
  offload->let_go_of_arrived();
  const bool first = !std::exchange(passed, true);
  c10::intrusive_ptr<c10::StorageImpl> there = held ? held : original.lock();
  if (there) {
    if (held_elsewhere && first && there.use_count() <= 2) {
      offload->held_elsewhere_[index] = 0;  // nobody else has it any more
    } else if (!held && !departing && first && !back && offload->newest(identity) == this) {
      // Somebody else has it.
      if (offload->held_elsewhere_.size() <= index) offload->held_elsewhere_.resize(index + 1, 0);
      offload->held_elsewhere_[index] = bytes;
    }
    if (first) {
      const std::shared_ptr<Engine> serving = engine;
      const py::gil_scoped_release release;
      serving->pass_by(id, {.thread = reader});
    }
    return c10::Storage(std::move(there));
  }
  if (c10::Storage known = back) {
    use_here(known);
    return known;
  }
  offload->offer(*this);
  c10::Storage brought = from_engine(reader);
  if (!brought) {
    brought = without_engine();
    offload->figures_.in_bytes += bytes;
  }
  back = brought;
  return brought;
}

/// None if the engine has ended.
c10::Storage OffloadedStorage::from_engine(std::thread::id reader) {
  const at::Device device = offload->device_;
  const Stream consumer = current_stream(device);
  const std::shared_ptr<Engine> serving = engine;
  Lease lease;
  try {
    const py::gil_scoped_release release;
    lease = serving->acquire(id, consumer, {.thread = reader});
  } catch (const ClosedError&) {
    return {};
  } catch (const Error&) {
    if (!device.is_cpu()) throw;
    return {};  // in a forked child
  }
  return leased_storage(std::move(lease), bytes, device);
}

/// Another stream than the one that it was brought for may read it.
void OffloadedStorage::use_here(const c10::Storage& brought) const {
  if (offload->device_.is_cpu()) return;
  const c10::Stream here = torch_stream(offload->device_);
  if (Lease* const lease = lease_of(*brought.unsafeGetStorageImpl())) {
    const py::gil_scoped_release release;
    lease->use_on(handle_of(here));
  } else {
    c10::impl::VirtualGuardImpl(here.device_type()).recordDataPtrOnStream(brought.data_ptr(), here);
  }
}

c10::Storage OffloadedStorage::without_engine() {
  {
    const py::gil_scoped_release release;
    engine->synchronise(written);
  }
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

SavedView::SavedView(std::shared_ptr<OffloadedStorage> of, const at::Tensor& tensor)
    : storage(std::move(of)),
      original(tensor),
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
SavedView::~SavedView() {
  --storage->views;
  storage->unpacked -= unpacked ? 1 : 0;
}

at::Tensor SavedView::unpack() {
  if (const std::uint32_t now = version.current_version(); now != saved_version) {
    const PlainTorch guard;
    refuse_if_written(saved_version, now, at::empty({0}, like), sizes);
  }
  const c10::Storage bytes = storage->bring(reader);
  if (at::Tensor alive = original.if_alive(); alive.defined()) return alive;
  const PlainTorch guard;
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(bytes), c10::DispatchKeySet(like.computeDispatchKey()), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  if (conjugate) made._set_conj(true);
  if (negative) made._set_neg(true);
  // Who writes to it writes to what was saved, and whoever asks for that again is told.
  made.unsafeGetTensorImpl()->set_version_counter(version);
  storage->offload->note_shown(shown, made, storage->bytes);
  if (!std::exchange(unpacked, true)) ++storage->unpacked;
  if (storage->unpacked >= storage->views) storage->back = c10::Storage();
  return made;
}

}  // namespace dynswap
