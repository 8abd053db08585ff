// Engine: a fork of the process.
//
// Note [A fork waits for engines]
// A forked child has one thread, the one that forked. Had another thread been inside an engine, the child
// would find half changed what its mutex guards, and an engine answers in the child too. So the fork takes
// the mutexes of all engines first, also of those whose plan was replaced and that only leases keep. In the
// child they are abandoned: they answer for what they counted, and do nothing else. Threads that waited for a
// copy, and so did not have the mutex, are no concern of the child's: see Note [A forked child has one
// thread].
//
// LOCK order: a handler that takes a lock under which engines are called is registered after
// register_fork_handlers(), as the last one that was registered runs first. The thread that forks may hold
// Python's lock, so nothing may wait for that under these mutexes.
#include <mutex>
#include <set>

#include "core/engine.h"
#include "platform/fork_safe.h"
#include "platform/process.h"

namespace dynswap {

struct Engine::Registry {
  Mutex mutex;
  std::set<Engine*> all;  ///< LOCK: mutex

  static Registry& get() {
    static auto* const one = new Registry;  // engines may outlive static objects
    static const bool follows_forks =
        at_fork([] { one->before(); }, [] { one->after(false); }, [] { one->after(true); });
    static_cast<void>(follows_forks);
    return *one;
  }

  void before() {
    mutex.lock();
    for (Engine* const engine : all) engine->mutex_.lock();
  }

  void after(bool in_child) {
    for (Engine* const engine : all) {
      if (in_child) engine->abandoned_ = true;
      engine->mutex_.unlock();
    }
    mutex.unlock();
  }
};

void Engine::register_fork_handlers() { static_cast<void>(Registry::get()); }

void Engine::refuse_in_child() { throw Error(kOnlyInParent); }

void Engine::register_engine() {
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  registry.all.insert(this);
}

void Engine::unregister_engine() noexcept {
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  registry.all.erase(this);
}

}  // namespace dynswap
