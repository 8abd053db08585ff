#include "transfer/usable_devices.h"

#include <atomic>
#include <cstdlib>

#include "platform/process.h"

namespace dynswap {
namespace {

std::atomic<bool> usable{true};

void forbid() noexcept { usable.store(false, std::memory_order_relaxed); }

}  // namespace

bool devices_usable() noexcept { return usable.load(std::memory_order_relaxed); }

void watch_process() noexcept {
  static const bool registered = [] {
    std::atexit(forbid);
    return at_fork(nullptr, nullptr, forbid);
  }();
  (void)registered;
}

}  // namespace dynswap
