#include "io/fork_gate.h"

#include <atomic>
#include <mutex>

#include "platform/fork_safe.h"
#include "platform/process.h"

namespace dynswap {

namespace {

struct Gate {
  Mutex mutex;
  Condition changed;
  // LOCK: mutex guards all below.
  int transfers = 0;
  bool forking = false;
};

using Gates = PerProcess<Gate>;  // threads that waited at the parent's are not in the child

std::atomic<Gates*> the_gate{nullptr};  // never freed: workers and fork handlers may outlive static objects

Gate& gate() { return **the_gate.load(); }

void before_fork() {
  Gate& gate = dynswap::gate();
  std::unique_lock lock(gate.mutex);
  gate.forking = true;
  static_cast<void>(gate.changed.wait(lock, [&] { return gate.transfers == 0; }));
  lock.release();  // held over the fork, so that no transfer begins
}

void after_fork_in_parent() {
  Gate& gate = dynswap::gate();
  gate.forking = false;
  gate.mutex.unlock();
  gate.changed.notify_all();
}

void make_gate() {
  static const bool made = [] {
    the_gate = new Gates;
    return at_fork(&before_fork, &after_fork_in_parent, nullptr);
  }();
  static_cast<void>(made);  // no memory for three pointers: then forks are not kept apart
}

}  // namespace

NoFork::NoFork() {
  make_gate();
  Gate& gate = dynswap::gate();
  std::unique_lock lock(gate.mutex);
  static_cast<void>(gate.changed.wait(lock, [&] { return !gate.forking; }));
  ++gate.transfers;
}

NoFork::~NoFork() {
  Gate& gate = dynswap::gate();
  {
    const std::lock_guard lock(gate.mutex);
    if (--gate.transfers > 0 || !gate.forking) return;
  }
  gate.changed.notify_all();
}

}  // namespace dynswap
