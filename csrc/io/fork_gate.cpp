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

std::atomic<Gate*> the_gate{nullptr};  // never freed: workers and fork handlers may outlive static objects

void before_fork() {
  Gate& gate = *the_gate;
  std::unique_lock lock(gate.mutex);
  gate.forking = true;
  static_cast<void>(gate.changed.wait(lock, [&] { return gate.transfers == 0; }));
  lock.release();  // held over the fork, so that no transfer begins
}

void after_fork_in_parent() {
  Gate& gate = *the_gate;
  gate.forking = false;
  gate.mutex.unlock();
  gate.changed.notify_all();
}

void after_fork_in_child() {
  the_gate.load()->mutex.unlock();
  the_gate = new Gate;  // threads that waited at the old one are not here
}

void make_gate() {
  static const bool made = [] {
    the_gate = new Gate;
    return at_fork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  }();
  static_cast<void>(made);  // no memory for three pointers: then forks are not kept apart
}

}  // namespace

NoFork::NoFork() {
  make_gate();
  Gate& gate = *the_gate;
  std::unique_lock lock(gate.mutex);
  static_cast<void>(gate.changed.wait(lock, [&] { return !gate.forking; }));
  ++gate.transfers;
}

NoFork::~NoFork() {
  Gate& gate = *the_gate;
  {
    const std::lock_guard lock(gate.mutex);
    if (--gate.transfers > 0 || !gate.forking) return;
  }
  gate.changed.notify_all();
}

}  // namespace dynswap
