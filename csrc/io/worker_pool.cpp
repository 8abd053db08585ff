#include "io/worker_pool.h"

#include <iterator>
#include <list>
#include <mutex>
#include <utility>
#include <vector>

#include "core/check.h"
#include "platform/fork_safe.h"
#include "platform/process.h"

namespace dynswap {

/// In a forked child, which has none of the threads, it is a new one: closed, and with nothing to wait for.
struct WorkerPool::State {
  Mutex mutex;
  Condition changed;
  // LOCK: mutex guards all below.
  std::list<Task> urgent;  // lists: moving a task to another queue allocates nothing
  std::list<Task> others;
  bool closed = true;           ///< until there are threads
  std::vector<Thread> threads;  ///< taken by the one close() that joins them

  void work() {
    for (;;) {
      Task task;
      {
        std::unique_lock lock(mutex);
        if (!changed.wait(lock, [&] { return closed || !urgent.empty() || !others.empty(); })) return;
        if (closed) return;
        std::list<Task>& queue = urgent.empty() ? others : urgent;
        task = std::move(queue.front());
        queue.pop_front();
      }
      task.run();
    }
  }
};

WorkerPool::WorkerPool(int threads) : state_(std::make_unique<PerProcess<State>>()) {
  DYNSWAP_CHECK(threads > 0, "a pool needs at least one thread, not " << threads);
  State& state = **state_;
  try {
    const std::lock_guard lock(state.mutex);
    state.closed = false;
    for (int i = 0; i < threads; ++i) {
      state.threads.push_back(start_thread("dynswap-io", [&state] { state.work(); }));
    }
  } catch (...) {
    close();
    throw;
  }
}

WorkerPool::~WorkerPool() { close(); }

bool WorkerPool::submit(Task task, bool urgent) {
  std::list<Task> added;
  added.push_back(std::move(task));
  State& state = **state_;
  {
    const std::lock_guard lock(state.mutex);
    if (state.closed) return false;
    std::list<Task>& queue = urgent ? state.urgent : state.others;
    queue.splice(queue.end(), added);
  }
  state.changed.notify_one();
  return true;
}

void WorkerPool::promote(const void* tag) noexcept {
  State& state = **state_;
  const std::lock_guard lock(state.mutex);
  std::list<Task>& others = state.others;
  for (auto task = others.begin(); task != others.end();) {
    const auto next = std::next(task);
    if (task->tag == tag) state.urgent.splice(state.urgent.end(), others, task);
    task = next;
  }
}

void WorkerPool::close() noexcept {
  std::list<Task> dropped;
  std::vector<Thread> threads;
  State& state = **state_;
  {
    const std::lock_guard lock(state.mutex);
    state.closed = true;
    dropped.splice(dropped.end(), state.urgent);
    dropped.splice(dropped.end(), state.others);
    threads.swap(state.threads);
  }
  state.changed.notify_all();
  for (const Task& task : dropped) {
    if (task.cancel) task.cancel();
  }
  for (Thread& thread : threads) thread.join();
}

}  // namespace dynswap
