#include "tensor/written_buffers.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/protection.h"
#include "tensor/handed_out.h"
#include "tensor/interpreter.h"
#include "tensor/master_record.h"
#include "tensor/server.h"

namespace dynswap {

namespace {

thread_local int depth = 0;  ///< calls that this thread is in

struct Buffers {
  /// By their addresses, which the weak pointers keep from being given to others.
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> handed_out;
  /// By their masters' numbers. Their storages have died.
  std::unordered_map<std::uint64_t, std::unique_ptr<HandedOut>> kept;
};

Buffers& buffers() {
  thread_local Buffers of_this_thread;
  return of_this_thread;
}

/// One wait for each device. All were sent on its current stream.
void wait_for_all(const std::vector<HandedOut*>& sent) {
  if (!PROTECTED(statistics_arrived)) return;
  const WithoutGil released;
  std::vector<c10::Device> waited_for;
  for (const HandedOut* const record : sent) {
    const c10::Device device = record->device();
    if (std::find(waited_for.begin(), waited_for.end(), device) != waited_for.end()) continue;
    waited_for.push_back(device);
    c10::Event arrived(device.type());
    arrived.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    arrived.synchronize();
  }
}

/// Writes back the records that there are now; a further one may come meanwhile.
void write_back_present() {
  Buffers now = std::exchange(buffers(), {});
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> alive;
  std::vector<HandedOut*> records;
  for (const auto& [address, storage] : now.handed_out) {
    auto held = storage.lock();
    HandedOut* const record = held ? HandedOut::of(*held) : nullptr;
    if (record == nullptr || !record->watched()) continue;
    records.push_back(record);
    alive.push_back(std::move(held));
  }
  std::vector<HandedOut*> to_send = records;
  for (const auto& [number, record] : now.kept) to_send.push_back(record.get());
  std::vector<HandedOut*> sent;
  for (HandedOut* const record : to_send) {
    if (!record->on_cpu() && record->start_write_back()) sent.push_back(record);
  }
  wait_for_all(sent);
  for (HandedOut* const record : sent) record->note_arrived();
  now.kept.clear();  // destroyed, they write back
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
  if (buffers().handed_out.try_emplace(&storage, handed_out.storage().getWeakStorageImpl()).second)
    HandedOut::of(storage)->watch();
}

void keep_until_the_call_ends(std::unique_ptr<HandedOut>& record) noexcept {
  if (!record->watched() || !inside_call() || record->on_cpu()) return;
  try {
    std::unique_ptr<HandedOut>& place = buffers().kept[record->origin().master->number];
    place = std::move(record);
  } catch (const std::bad_alloc&) {
    // It writes back now, and waits.
  }
}

std::unique_ptr<HandedOut> taken_back(const MasterRecord& master) {
  auto found = buffers().kept.extract(master.number);
  if (found.empty()) return nullptr;
  found.mapped()->unwatch_all();
  return std::move(found.mapped());
}

void write_back_kept(const MasterRecord& master) { buffers().kept.erase(master.number); }

void write_back_buffers() {
  // One that is watched for good may die here, and is kept.
  while (!buffers().handed_out.empty() || !buffers().kept.empty()) write_back_present();
}

}  // namespace dynswap
