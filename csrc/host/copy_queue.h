// Copies that wait for one another, carried out by worker threads.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "core/scalar.h"
#include "host/chunks.h"
#include "io/read_policy.h"
#include "io/worker_pool.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// Note [No worker waits for an event]: were a worker to block until a step's `after` is done, as many such
/// steps as there are workers would stop the pool for good when the copies they wait for are queued behind
/// them. So a step is queued only when the last of its events is done; until then it stands in the lists of
/// those events (Copy::dependants), and whoever completes an event queues what has become ready.
///
/// Note [A short copy is made at once]: to wake a worker, and to be woken by it, takes as long as to copy
/// some ten kilobytes. So a copy that waits for nothing, and whose bytes are few and in RAM, is made by the
/// calling thread. A file's bytes are in RAM if the page cache has most of each range. A range with Keep::no
/// is never short, nor is one of a mapping whose file is not known: to read it may wait for the disk.
///
/// All calls are thread-safe. The events are those of copy() of the same queue, or null.
class CopyQueue {
 public:
  /// Copies of `at_once` bytes at most are short.
  CopyQueue(CastFn cast, int threads, std::size_t at_once);
  ~CopyQueue();

  EventPtr copy(CopyRequest request);

  /// Blocks until the copy is over. What of it has not begun goes before other copies from now on, and so
  /// does what it waits for. Throws what made it fail, every time; in a forked child, that it is not over.
  void wait(const EventPtr& event);
  /// Blocks until the copy is over. In a forked child it does not: nothing of this queue runs there.
  void synchronise(const EventPtr& event) noexcept;

  /// Copies that are not over fail, except that chunks that have begun are finished. Idempotent.
  void close() noexcept;

 private:
  struct Copy;
  struct Part;
  /// One step of a copy.
  struct PartRef {
    std::shared_ptr<Copy> copy;
    std::size_t index = 0;
  };

  bool is_short(const CopyRequest& request) const;
  EventPtr copy_at_once(const CopyRequest& request);
  std::exception_ptr bring(Copy& copy, const std::vector<const Chunk*>& chunks, ReadMode mode);
  void queue(std::vector<PartRef> ready);
  bool submit(const PartRef& ref, std::size_t chunk);
  void run(const PartRef& ref, std::size_t chunk);
  std::vector<PartRef> chunks_over(const PartRef& ref, std::size_t count, std::exception_ptr error);
  void promote(const std::shared_ptr<Copy>& copy);

  const CastFn cast_;
  const std::size_t at_once_;
  ReadPolicy read_policy_;
  Mutex mutex_;
  Condition over_;  ///< some copy is over
  // LOCK: mutex_ guards these, and the copies' fields.
  bool closed_ = false;
  int made_at_once_ = 0;  ///< by threads that are at it
  WorkerPool pool_;       ///< last: its threads use all of the above
};

}  // namespace dynswap
