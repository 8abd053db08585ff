#include "io/worker_pool.h"

#include <condition_variable>
#include <iterator>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "platform/process.h"

namespace dynswap {

struct WorkerPool::State {
  std::mutex mutex;
  std::condition_variable changed;
  // LOCK: mutex guards all below.
  std::list<Task> urgent;  // lists: moving a task to another queue allocates nothing
  std::list<Task> others;
  bool closed = false;
  std::vector<std::thread> threads;  ///< taken by the one close() that joins them

  void work() {
    for (;;) {
      Task task;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return closed || !urgent.empty() || !others.empty(); });
        if (closed) return;
        std::list<Task>& queue = urgent.empty() ? others : urgent;
        task = std::move(queue.front());
        queue.pop_front();
      }
      task.run();
    }
  }
};

WorkerPool::WorkerPool(int threads) : state_(std::make_unique<State>()) {
  DYNSWAP_CHECK(threads > 0, "a pool needs at least one thread, not " << threads);
  try {
    const std::lock_guard lock(state_->mutex);
    for (int i = 0; i < threads; ++i) {
      state_->threads.push_back(start_thread("dynswap-io", [state = state_.get()] { state->work(); }));
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
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closed) return false;
    std::list<Task>& queue = urgent ? state_->urgent : state_->others;
    queue.splice(queue.end(), added);
  }
  state_->changed.notify_one();
  return true;
}

void WorkerPool::promote(const void* tag) noexcept {
  const std::lock_guard lock(state_->mutex);
  std::list<Task>& others = state_->others;
  for (auto task = others.begin(); task != others.end();) {
    const auto next = std::next(task);
    if (task->tag == tag) state_->urgent.splice(state_->urgent.end(), others, task);
    task = next;
  }
}

void WorkerPool::close() noexcept {
  std::list<Task> dropped;
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
    dropped.splice(dropped.end(), state_->urgent);
    dropped.splice(dropped.end(), state_->others);
    threads.swap(state_->threads);
  }
  state_->changed.notify_all();
  for (const Task& task : dropped) {
    if (task.cancel) task.cancel();
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace dynswap
