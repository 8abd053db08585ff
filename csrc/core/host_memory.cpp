#include "core/host_memory.h"

#include <algorithm>
#include <list>
#include <mutex>

#include "platform/fork_safe.h"

namespace dynswap {

namespace {

struct Account {
  Mutex mutex;
  // LOCK: mutex guards all below.
  std::array<std::size_t, kHostUses> used{};
  std::list<HostLimits> limits;

  std::size_t& of(HostUse use) { return used[static_cast<std::size_t>(use)]; }

  bool has_room(HostUse use, std::size_t bytes) {
    const std::size_t copies = of(HostUse::copies), cached = of(HostUse::page_cache);
    const std::size_t activations = of(HostUse::activations);
    const auto fits = [bytes](std::size_t taken, std::size_t limit) {
      return taken <= limit && bytes <= limit - taken;
    };
    const auto room_for_copies = [&](const HostLimits& limit) { return fits(copies, limit.copies); };
    if (use == HostUse::copies && !limits.empty() &&
        std::none_of(limits.begin(), limits.end(), room_for_copies))
      return false;
    return std::all_of(limits.begin(), limits.end(), [&](const HostLimits& limit) {
      const bool locks = use == HostUse::locked || use == HostUse::copies || use == HostUse::activations;
      if (locks && !fits(of(HostUse::locked) + copies + activations, limit.locked)) return false;
      if (use == HostUse::page_cache && !fits(cached, limit.page_cache)) return false;
      const std::size_t staging = std::max(of(HostUse::staging), limit.staging);
      return use == HostUse::locked || fits(copies + staging + cached + activations, limit.beside_masters);
    });
  }
};

/// Never destroyed: what is charged may go after it would.
Account& account() {
  static auto& of_process = *new PerProcess<Account>();
  return *of_process;
}

std::size_t sum(std::size_t limit, std::size_t used) noexcept {
  return used > SIZE_MAX - limit ? SIZE_MAX : limit + used;
}

}  // namespace

std::shared_ptr<const void> HostMemory::limit(const HostLimits& limits) {
  Account& now = account();
  const std::lock_guard lock(now.mutex);
  const auto entry = now.limits.insert(now.limits.end(), limits);
  entry->copies = sum(limits.copies, now.of(HostUse::copies));
  entry->page_cache = sum(limits.page_cache, now.of(HostUse::page_cache));
  return {&*entry, [entry, process = forks()](const void*) {
            if (process != forks()) return;
            Account& later = account();
            const std::lock_guard ending(later.mutex);
            later.limits.erase(entry);
          }};
}

bool HostMemory::named() {
  Account& now = account();
  const std::lock_guard lock(now.mutex);
  return std::any_of(now.limits.begin(), now.limits.end(),
                     [](const HostLimits& limit) { return limit.beside_masters != SIZE_MAX; });
}

std::array<std::size_t, kHostUses> HostMemory::used() {
  Account& now = account();
  const std::lock_guard lock(now.mutex);
  return now.used;
}

HostMemory::Charge::Charge(HostUse use) noexcept : use_(use), process_(forks()) {}

HostMemory::Charge::~Charge() {
  if (process_ != forks()) return;
  Account& now = account();
  const std::lock_guard lock(now.mutex);
  now.of(use_) -= bytes_;
}

bool HostMemory::Charge::grow(std::size_t bytes) {
  if (process_ != forks()) return false;
  Account& now = account();
  const std::lock_guard lock(now.mutex);
  if (!now.has_room(use_, bytes)) return false;
  now.of(use_) += bytes;
  bytes_ += bytes;
  return true;
}

void HostMemory::Charge::must_grow(std::size_t bytes) {
  if (process_ != forks()) return;
  Account& now = account();
  const std::lock_guard lock(now.mutex);
  now.of(use_) += bytes;
  bytes_ += bytes;
}

std::shared_ptr<const HostMemory::Charge> HostMemory::charge(HostUse use, std::size_t bytes) {
  const auto made = std::make_shared<Charge>(use);
  return made->grow(bytes) ? made : nullptr;
}

}  // namespace dynswap
