#include "transfer/process.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>

namespace dynswap {
namespace {

std::atomic<bool> usable{true};

void forbid() noexcept { usable.store(false, std::memory_order_relaxed); }

}  // namespace

bool devices_usable() noexcept { return usable.load(std::memory_order_relaxed); }

void watch_process() noexcept {
  static const int registered = [] {
    std::atexit(forbid);
    return pthread_atfork(nullptr, nullptr, forbid);
  }();
  (void)registered;
}

}  // namespace dynswap
