// Threads that work off a queue.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "platform/fork_safe.h"

namespace dynswap {

/// All calls are thread-safe. The threads block every signal (they belong to the interpreter's main thread)
/// and are named "dynswap-io". In a forked child, which does not have them, the pool is closed; the tasks are
/// the parent's.
class WorkerPool {
 public:
  struct Task {
    std::function<void()> run;     ///< must not throw
    std::function<void()> cancel;  ///< called in place of `run` if the pool closes first; may be empty
    const void* tag = nullptr;     ///< what promote() knows the task by; not dereferenced
  };

  explicit WorkerPool(int threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// Urgent tasks begin before all others; among equals, who came first begins first.
  /// False, and nothing is called, if the pool is closed.
  bool submit(Task task, bool urgent = false);

  /// Makes the tasks with this tag urgent, as far as they have not begun.
  void promote(const void* tag) noexcept;

  /// Drops the tasks that have not begun (`cancel` is called on this thread), waits for those that have,
  /// and joins the threads. Idempotent. Not from a task.
  void close() noexcept;

 private:
  struct State;
  std::unique_ptr<PerProcess<State>> state_;
};

}  // namespace dynswap
