#include "tensor/master_memory.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <exception>
#include <type_traits>
#include <utility>

#include "accelerator/backends.h"
#include "core/protection.h"
#include "platform/own_pages.h"
#include "tensor/interpreter.h"
#include "tensor/shared_memory.h"

namespace dynswap {

namespace {

/// The way in which the storage frees its memory, to be exchanged without touching the pointer to it, which
/// others may be reading.
HeldBytes::Context& context_of(c10::StorageImpl& storage) {
  auto&& context = storage._mutable_data_ptr_no_checks().move_context();  // a reference: nothing is moved yet
  static_assert(std::is_same_v<decltype(context), HeldBytes::Context&&>);
  return context;
}

void leave(HeldBytes& bytes, c10::StorageImpl* storage) noexcept {
  bytes.leave(storage == nullptr ? nullptr : &context_of(*storage));
}

}  // namespace

KeptLocked::KeptLocked(const at::Tensor& master, const at::Device& device) {
  if (!PROTECTED(copies_keep_locks) || device.is_cpu() || !master.has_storage()) return;
  c10::StorageImpl& impl = *master.storage().unsafeGetStorageImpl();
  if (!impl.device().is_cpu() || !HeldBytes::of(context_of(impl))) return;
  storage_ = master.storage();
  bytes_ = HeldBytes::hold(context_of(impl));
  const WithoutGil released;
  locked_ = bytes_->lock_again();
}

KeptLocked::~KeptLocked() {
  if (!bytes_) return;
  if (locked_) {
    const WithoutGil released;
    bytes_->unlock();
  }
  leave(*bytes_, storage_.unsafeGetStorageImpl());
}

bool MasterMemory::can_hold(const c10::Storage& storage) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  const c10::DataPtr& data = impl._mutable_data_ptr_no_checks();
  if (!data.device().is_cpu() || data.get() == nullptr) return false;
  if (HeldBytes::of(context_of(impl))) return true;
  return frees_shared_memory(data.get_deleter()) ||
         (data.get_context() == data.get() &&
          data.get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter());
}

void MasterMemory::expect(std::size_t storages) {
  held_.reserve(held_.size() + storages);
  sweep_at_ = std::max(sweep_at_, held_.size() + storages);
}

std::shared_ptr<const void> MasterMemory::hold(const c10::Storage& storage) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  if (!can_hold(storage)) return std::make_shared<c10::Storage>(storage);
  if (std::shared_ptr<HeldBytes> known = HeldBytes::of(context_of(impl))) {
    const auto entry = held_.find(known.get());
    if (entry != held_.end() && entry->second.bytes.lock() == known) return known;
  }
  if (held_.size() >= sweep_at_) {
    std::erase_if(held_, [](const auto& entry) { return entry.second.bytes.expired(); });
    sweep_at_ = 2 * held_.size() + 64;
  }
  std::shared_ptr<HeldBytes> bytes = HeldBytes::hold(context_of(impl));
  held_.insert_or_assign(bytes.get(), Held{bytes, storage.getWeakStorageImpl(), 0});
  return bytes;
}

std::string MasterMemory::pin(const at::Device& device, const std::string& backend, PinnedCopies& copies,
                              std::vector<SourcePtr>& sources) {
  // Held once more for the time without the GIL, in which another thread may end() this.
  struct Candidate {
    std::shared_ptr<HeldBytes> bytes;
    c10::intrusive_ptr<c10::StorageImpl> storage;
  };
  std::vector<Candidate> candidates(sources.size());
  std::vector<Lockable> items(sources.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    items[i].source = sources[i];
    const auto found = held_.find(sources[i]->owner.get());
    if (found == held_.end()) continue;
    auto storage = found->second.storage.lock();
    auto bytes = found->second.bytes.lock();
    // Bytes that their storage has let go of are read once more at most.
    if (!storage || !bytes || HeldBytes::of(context_of(*storage)) != bytes) continue;
    items[i].held = HeldBytes::hold(context_of(*storage));
    items[i].block = static_cast<const std::byte*>(storage->data());
    items[i].block_bytes = storage->nbytes();
    items[i].own_pages =
        frees_shared_memory(bytes->deleter()) || has_own_pages(items[i].block, items[i].block_bytes);
    candidates[i] = {std::move(bytes), std::move(storage)};
  }
  std::string said;
  std::exception_ptr error;
  {
    const WithoutGil released;
    try {
      const auto of_torch = Interpreter::get().host_register;
      said = pin_items(device, backend, of_torch ? of_torch(device) : nullptr, copies, items);
    } catch (...) {
      error = std::current_exception();
    }
  }
  std::vector<std::shared_ptr<HeldBytes>> owed;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    sources[i] = std::move(items[i].source);
    const auto& [bytes, storage] = candidates[i];
    if (!bytes) continue;
    const auto found = held_.find(bytes.get());
    if (items[i].locked && found != held_.end()) {
      ++found->second.locks;
    } else if (items[i].locked) {
      owed.push_back(bytes);
    }
  }
  if (!owed.empty()) {
    const WithoutGil released;
    for (const auto& bytes : owed) bytes->unlock();
  }
  for (const auto& [bytes, storage] : candidates) {
    if (bytes) leave(*bytes, storage.get());
  }
  if (error) std::rethrow_exception(error);
  return said;
}

bool MasterMemory::pinned(const Source& source) const {
  const auto found = held_.find(source.owner.get());
  if (found == held_.end()) return false;
  const std::shared_ptr<HeldBytes> bytes = found->second.bytes.lock();
  if (!bytes) return false;
  const WithoutGil released;  // another thread may be locking them
  return bytes->locked();
}

void MasterMemory::end() noexcept {
  std::vector<std::pair<std::shared_ptr<HeldBytes>, Held>> alive;
  bool locked = false;
  for (auto& [key, held] : std::exchange(held_, {})) {
    locked = locked || held.locks > 0;
    if (auto bytes = held.bytes.lock()) alive.emplace_back(std::move(bytes), std::move(held));
  }
  if (locked) {
    const WithoutGil released;
    for (auto& [bytes, held] : alive) {
      for (; held.locks > 0; --held.locks) bytes->unlock();
    }
  }
  for (const auto& [bytes, held] : alive) {
    const auto storage = held.storage.lock();
    leave(*bytes, storage.get());
  }
}

// Leaked on purpose: destroying the entries could call CUDA, or wait for a mutex that no thread of the child
// will release.
void MasterMemory::abandon() noexcept { new auto(std::exchange(held_, {})); }

}  // namespace dynswap
