#include "tensor/written_buffers.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/protection.h"
#include "platform/fork_safe.h"
#include "tensor/handed_out.h"
#include "tensor/interpreter.h"
#include "tensor/master_record.h"
#include "tensor/server.h"

namespace dynswap {

namespace {

thread_local int depth = 0;  ///< calls that this thread is in

/// What this thread is to look at, by its address, which the weak pointer keeps from being given to others.
using Watched = std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>>;

Watched& watched_here() {
  thread_local Watched of_this_thread;
  return of_this_thread;
}

/// Records whose storages have died, until the call ends on the thread that keeps them. Any other thread that
/// is handed the same buffer meanwhile takes the record, as it would see the same memory in plain torch.
/// Who takes or destroys a record has the GIL; who adds one may not.
class Kept {
 public:
  static Kept& of_this_process() {
    static auto* const kept = new PerProcess<Kept>;  // never freed: tensors may outlive static objects
    return **kept;
  }

  /// Adds the record, in exchange for one that has been kept of the same master, or null.
  void add(std::unique_ptr<HandedOut>& record) {
    const std::lock_guard lock(mutex_);
    Place& place = by_master_[record->origin().master->number];
    place.keeper = std::this_thread::get_id();
    place.record.swap(record);
    count_ = by_master_.size();
  }

  /// The master's record, whoever keeps it.
  std::unique_ptr<HandedOut> take(std::uint64_t master) {
    if (count_ == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto found = by_master_.find(master);
    return found == by_master_.end() ? nullptr : take(found);
  }

  /// The master's record, if it is `only` and this thread still keeps it: another thread may have taken it,
  /// written more, and keep it now.
  std::unique_ptr<HandedOut> take_if_here(std::uint64_t master, const HandedOut* only) {
    const std::lock_guard lock(mutex_);
    const auto found = by_master_.find(master);
    if (found == by_master_.end() || found->second.record.get() != only ||
        found->second.keeper != std::this_thread::get_id())
      return nullptr;
    return take(found);
  }

  /// What this thread keeps, with the numbers of the masters.
  std::vector<std::pair<std::uint64_t, HandedOut*>> here() {
    std::vector<std::pair<std::uint64_t, HandedOut*>> found;
    if (count_ == 0) return found;
    const std::lock_guard lock(mutex_);
    for (const auto& [master, place] : by_master_) {
      if (place.keeper == std::this_thread::get_id()) found.emplace_back(master, place.record.get());
    }
    return found;
  }

 private:
  struct Place {
    std::thread::id keeper;
    std::unique_ptr<HandedOut> record;
  };

  std::unique_ptr<HandedOut> take(std::unordered_map<std::uint64_t, Place>::iterator found) {
    auto record = std::move(found->second.record);
    by_master_.erase(found);
    count_ = by_master_.size();
    return record;
  }

  Mutex mutex_;
  std::unordered_map<std::uint64_t, Place> by_master_;  ///< LOCK: mutex_. By MasterRecord::number
  std::atomic<std::size_t> count_{0};                   ///< of them, for who need not look
};

/// One wait for each device. All were sent on its current stream.
void wait_for_all(const std::vector<c10::Device>& devices) {
  if (!PROTECTED(statistics_arrived)) return;
  const WithoutGil released;
  std::vector<c10::Device> waited_for;
  for (const c10::Device device : devices) {
    if (std::find(waited_for.begin(), waited_for.end(), device) != waited_for.end()) continue;
    waited_for.push_back(device);
    c10::Event arrived(device.type());
    arrived.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    arrived.synchronize();
  }
}

/// Writes back the records that there are now; a further one may come meanwhile.
void write_back_present() {
  const Watched now = std::exchange(watched_here(), {});
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> alive;
  std::vector<HandedOut*> records;
  for (const auto& [address, storage] : now) {
    auto held = storage.lock();
    HandedOut* const record = held ? HandedOut::of(*held) : nullptr;
    if (record == nullptr || !record->watched()) continue;
    records.push_back(record);
    alive.push_back(std::move(held));
  }
  const auto kept = Kept::of_this_process().here();
  std::vector<HandedOut*> to_send = records;
  for (const auto& [master, record] : kept) to_send.push_back(record);
  std::unordered_set<const HandedOut*> sent;
  std::vector<c10::Device> devices;
  for (HandedOut* const record : to_send) {
    if (record->on_cpu() || !record->start_write_back()) continue;
    sent.insert(record);
    devices.push_back(record->device());
  }
  wait_for_all(devices);
  const auto note_if_sent = [&sent](HandedOut* record) {
    if (sent.contains(record)) record->note_arrived();
  };
  std::vector<std::unique_ptr<HandedOut>> ours;
  for (const auto& [master, record] : kept) {
    if (auto still_kept = Kept::of_this_process().take_if_here(master, record))
      ours.push_back(std::move(still_kept));
  }
  for (const auto& record : ours) note_if_sent(record.get());
  for (HandedOut* const record : records) note_if_sent(record);
  ours.clear();  // destroyed, they write back
  for (std::size_t i = 0; i < alive.size(); ++i) {
    write_back_living(alive[i]);
    records[i]->unwatch();
  }
}

}  // namespace

InsideAnyCall::InsideAnyCall() noexcept { ++depth; }

InsideAnyCall::~InsideAnyCall() { --depth; }

bool inside_call() noexcept { return depth > 0; }

void write_back_living(const c10::intrusive_ptr<c10::StorageImpl>& storage) {
  HandedOut* const record = HandedOut::of(*storage);
  if (record == nullptr) return;
  if (const std::shared_ptr<Server> server = record->origin().server.lock()) {
    server->write_back_latest(storage);
  } else {
    record->write_back();
  }
}

void write_back_after_call(const at::Tensor& handed_out) {
  c10::StorageImpl& storage = *handed_out.storage().unsafeGetStorageImpl();
  if (watched_here().try_emplace(&storage, handed_out.storage().getWeakStorageImpl()).second)
    HandedOut::of(storage)->watch();
}

void keep_until_the_call_ends(std::unique_ptr<HandedOut>& record) noexcept {
  if (!record->watched() || !inside_call() || record->on_cpu()) return;
  try {
    Kept::of_this_process().add(record);
  } catch (const std::bad_alloc&) {
    // It writes back now, and waits.
  }
}

std::unique_ptr<HandedOut> taken_back(const MasterRecord& master) {
  auto record = Kept::of_this_process().take(master.number);
  if (record != nullptr) record->unwatch_all();
  return record;
}

void write_back_kept(const MasterRecord& master) {
  static_cast<void>(Kept::of_this_process().take(master.number));  // destroyed, it writes back
}

void write_back_buffers() {
  // One that is watched for good may die here, and is kept.
  while (!watched_here().empty() || !Kept::of_this_process().here().empty()) write_back_present();
}

}  // namespace dynswap
