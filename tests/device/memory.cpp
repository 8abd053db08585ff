// Memory: device addresses and the bytes behind them, page-locked host memory, and copies between any of
// them.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "machine_state.h"
#include "pages.h"

namespace pretend {

namespace {

constexpr std::size_t kAlignment = 512;
constexpr std::size_t kPage = 4096;

Pinned pinned_locked(const Machine& m, std::uintptr_t begin, std::size_t bytes) {
  auto found = m.pinned.upper_bound(begin);
  if (found != m.pinned.begin() && std::prev(found)->second.first > begin) {
    return std::prev(found)->second.first >= begin + bytes ? Pinned::whole : Pinned::torn;
  }
  return found != m.pinned.end() && found->first < begin + bytes ? Pinned::torn : Pinned::no;
}

/// What is locked with these bytes: their pages, or just themselves.
std::pair<std::uintptr_t, std::uintptr_t> locked_with(const Machine& m, const void* address,
                                                      std::size_t bytes) {
  const std::size_t unit = m.faults.locks_bytes ? 1 : kPage;
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  return {begin / unit * unit, (begin + bytes + unit - 1) / unit * unit};
}

/// Whether so much more may be page-locked, in place or not.
bool may_lock(const Machine& m, std::size_t bytes) {
  std::size_t all = bytes;
  for (const auto& [begin, end] : m.pinned) all += end.first - begin;
  return all <= m.faults.locked_at_most;
}

/// The bytes themselves. Memory that was pinned when the copy was asked for has to be so still.
void move_bytes(void* to, const void* from, std::size_t bytes, bool pinned_source, bool pinned_target) {
  const auto still = [bytes](const void* address, const char* what) {
    const bool is_pinned = pinned(address, bytes) == Pinned::whole;
    if (is_pinned && mapped(address, bytes)) return true;
    violate(std::string("a queued copy ") + what + " memory that is not " +
            (is_pinned ? "mapped" : "pinned") + " any more");
    return false;
  };
  if (pinned_source && !still(from, "reads")) return;
  if (pinned_target && !still(to, "writes")) return;
  const void* const source = hidden(from) != nullptr ? hidden(from) : from;
  void* const target = hidden(to) != nullptr ? hidden(to) : to;
  std::memcpy(target, source, bytes);
}

}  // namespace

int device_of(const void* address) noexcept {
  const auto* at = static_cast<const std::byte*>(address);
  for (int device = 0; device < kDevices; ++device) {
    const std::byte* const begin = machine().memory[device].visible;
    if (at >= begin && at < begin + kSpan) return device;
  }
  return -1;
}

std::byte* hidden(const void* address) noexcept {
  const int device = device_of(address);
  if (device < 0) return nullptr;
  const Memory& memory = machine().memory[device];
  return memory.hidden + (static_cast<const std::byte*>(address) - memory.visible);
}

void* reserve(int device, std::size_t bytes) {
  Machine& m = machine();
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard lock(m.mutex);
  auto& free = m.memory[device].free;
  for (auto it = free.begin(); it != free.end(); ++it) {
    if (it->second < size) continue;
    const auto [offset, room] = *it;
    free.erase(it);
    if (room > size) free[offset + size] = room - size;
    return m.memory[device].visible + offset;
  }
  return nullptr;
}

void release(int device, void* address, std::size_t bytes) {
  Machine& m = machine();
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard lock(m.mutex);
  Memory& memory = m.memory[device];
  const std::size_t offset = static_cast<std::byte*>(address) - memory.visible;
  const std::size_t first = (offset + kPage - 1) / kPage * kPage, last = (offset + size) / kPage * kPage;
  if (last > first) madvise(memory.hidden + first, last - first, MADV_DONTNEED);
  auto [it, fresh] = memory.free.emplace(offset, size);
  if (const auto next = std::next(it); next != memory.free.end() && next->first == it->first + it->second) {
    it->second += next->second;
    memory.free.erase(next);
  }
  if (it != memory.free.begin()) {
    const auto before = std::prev(it);
    if (before->first + before->second == it->first) {
      before->second += it->second;
      memory.free.erase(it);
    }
  }
}

void poison(Stream& stream, void* address, std::size_t bytes) {
  std::byte* const at = hidden(address);
  enqueue(stream, [at, bytes] { std::memset(at, kPoison, bytes); }, "poison");
}

Pinned pinned(const void* address, std::size_t bytes) {
  const std::lock_guard lock(machine().mutex);
  return pinned_locked(machine(), reinterpret_cast<std::uintptr_t>(address), bytes);
}

std::pair<std::uintptr_t, std::size_t> pinned_range(const void* address) {
  const Machine& m = machine();
  const std::lock_guard lock(machine().mutex);
  auto found = m.pinned.upper_bound(reinterpret_cast<std::uintptr_t>(address));
  if (found == m.pinned.begin()) return {};
  const auto& [begin, entry] = *--found;
  if (entry.first <= reinterpret_cast<std::uintptr_t>(address)) return {};
  return {begin, entry.first - begin};
}

int pin(void* address, std::size_t bytes) {
  Machine& m = machine();
  if (bytes == 0 || address == nullptr || !may_be_locked(address)) return kInvalidValue;
  std::this_thread::sleep_for(std::chrono::milliseconds(m.faults.registration_ms));
  const auto [begin, end] = locked_with(m, address, bytes);
  const std::lock_guard lock(m.mutex);
  if (pinned_locked(m, begin, end - begin) != Pinned::no) return kAlreadyRegistered;
  if (m.counts.registered_bytes + (end - begin) > m.faults.register_at_most || !may_lock(m, end - begin))
    return kMemoryAllocation;
  m.counts.registered_bytes += end - begin;
  m.pinned[begin] = {end, false};
  write_to_pages(reinterpret_cast<void*>(begin), end - begin);
  mark_pages(reinterpret_cast<void*>(begin), end - begin);
  return 0;
}

int unpin(void* address) {
  Machine& m = machine();
  const std::uintptr_t begin = locked_with(m, address, 1).first;
  const std::lock_guard lock(m.mutex);
  const auto found = m.pinned.find(begin);
  if (found == m.pinned.end() || found->second.second) {
    return pinned_locked(m, begin, 1) == Pinned::no ? kNotRegistered : kInvalidValue;
  }
  const std::size_t bytes = found->second.first - begin;
  if (m.watching_pages && !pages_marked(reinterpret_cast<void*>(begin), bytes)) {
    m.violations.push_back("pages were unmapped while they were registered");
  }
  unmark_pages(reinterpret_cast<void*>(begin), bytes);
  m.counts.registered_bytes -= bytes;
  m.pinned.erase(found);
  return 0;
}

void* allocate_pinned(std::size_t bytes) {
  Machine& m = machine();
  std::size_t size = (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  std::vector<std::pair<void*, std::size_t>> over;
  {
    const std::lock_guard lock(m.mutex);
    std::erase_if(m.limbo, [&](auto& each) {
      if (!std::all_of(each.first.begin(), each.first.end(), [](const auto& p) { return p->reached; }))
        return false;
      over.push_back(each.second);
      return true;
    });
    for (const auto& [at, length] : over) m.pinned.erase(reinterpret_cast<std::uintptr_t>(at));
    if (m.faults.no_host_memory || !may_lock(m, size)) size = 0;
  }
  for (const auto& [at, length] : over) munmap(at, length);
  if (size == 0) return nullptr;
  void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  std::memset(at, kPoison, bytes);
  const std::lock_guard lock(m.mutex);
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  m.pinned[begin] = {begin + size, true};
  return at;
}

void free_pinned(void* address, std::vector<PointPtr> users) {
  Machine& m = machine();
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  std::size_t size = 0;
  {
    const std::lock_guard lock(m.mutex);
    const auto found = m.pinned.find(begin);
    if (found == m.pinned.end() || !found->second.second) {
      m.violations.push_back("pinned memory is freed that was not allocated");
      return;
    }
    size = found->second.first - begin;
    std::erase_if(users, [](const PointPtr& point) { return point->reached; });
    if (!users.empty()) {
      m.limbo.push_back({std::move(users), {address, size}});
      return;
    }
    m.pinned.erase(found);
  }
  munmap(address, size);
}

void copy(Stream& stream, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  Machine& m = machine();
  const bool from_host = device_of(from) < 0, to_host = device_of(to) < 0;
  const Pinned source = from_host ? pinned(from, bytes) : Pinned::no;
  const Pinned target = to_host ? pinned(to, bytes) : Pinned::no;
  if (source == Pinned::torn || target == Pinned::torn) {
    throw DeviceFault(kInvalidValue, "a copy spans memory that is pinned and memory that is not");
  }
  const bool pinned_source = source == Pinned::whole, pinned_target = target == Pinned::whole;
  if (to_host && !pinned_target) refuse_if_forbidden("a copy to pageable memory");
  if (from_host && !to_host) {
    const std::lock_guard lock(m.mutex);
    if (++m.counts.copies == m.faults.fail_copy) throw DeviceFault(kInvalidValue, "this copy is refused");
    m.counts.copied_bytes += bytes;
    if (!pinned_source) ++m.counts.pageable_copies;
    if (m.drops_work) return;
  }
  if (from_host && !pinned_source) {  // read before the call returns
    auto staged = std::make_shared<std::vector<std::byte>>(bytes);
    std::memcpy(staged->data(), from, bytes);
    enqueue(stream, [=] { move_bytes(to, staged->data(), bytes, false, pinned_target); }, "a copy", bytes);
  } else if (pinned_source) {
    const auto begin = reinterpret_cast<std::uintptr_t>(from);
    {
      const std::lock_guard lock(m.mutex);
      m.pending_reads.emplace(begin, begin + bytes);
    }
    const auto work = [=, &m] {
      move_bytes(to, from, bytes, true, pinned_target);
      const std::lock_guard lock(m.mutex);
      if (const auto found = m.pending_reads.find(begin); found != m.pending_reads.end()) {
        m.pending_reads.erase(found);
      }
    };
    enqueue(stream, work, "a copy from pinned memory", bytes);
  } else {
    if (pinned_target) {
      const auto begin = reinterpret_cast<std::uintptr_t>(to);
      const std::lock_guard lock(m.mutex);
      const bool read = std::any_of(m.pending_reads.begin(), m.pending_reads.end(), [&](const auto& range) {
        return range.first < begin + bytes && range.second > begin;
      });
      if (!read) std::memset(to, kPoison, bytes);
    }
    enqueue(
        stream, [=] { move_bytes(to, from, bytes, false, pinned_target); }, "a copy", to_host ? bytes : 0);
  }
  if (to_host && !pinned_target) synchronise(stream, "a copy to pageable memory");
}

}  // namespace pretend
