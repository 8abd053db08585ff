// Writes to files, while the caller goes on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>

#include "core/backend.h"
#include "io/file.h"
#include "io/worker_pool.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// Bytes on their way to a file. Thread-safe.
class PendingWrite {
 public:
  bool done() const noexcept;
  /// Waits until it is over, for so long at most. False if it is not; at once in a forked child, if it was
  /// not at the fork.
  bool wait(std::optional<std::chrono::seconds> patience = std::nullopt) noexcept;
  /// Why the file did not take the bytes, once it is over; else null.
  std::exception_ptr error() const noexcept;
  /// What it waits for never happens: the device has failed.
  void give_up() noexcept { given_up_.store(true, std::memory_order_relaxed); }

 private:
  friend class FileWriter;
  void end(std::exception_ptr error) noexcept;

  std::atomic<bool> given_up_{false};
  mutable Mutex mutex_;
  Condition over_;
  // LOCK: mutex_ guards both.
  bool done_ = false;
  std::exception_ptr error_;
};

/// All calls are thread-safe. What has not begun when it ends is not written.
class FileWriter {
 public:
  FileWriter() = default;
  ~FileWriter() { ending_.store(true, std::memory_order_relaxed); }
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  /// Begins to write `bytes` at `src` to a scratch file, once `after` is done. All that it is given is kept
  /// until then; `owner` too, which has the range of the file.
  std::shared_ptr<PendingWrite> write(std::shared_ptr<const File> file, std::uint64_t offset,
                                      std::shared_ptr<const std::byte> src, std::size_t bytes, EventPtr after,
                                      std::shared_ptr<const void> owner);

 private:
  std::atomic<bool> ending_{false};
  WorkerPool pool_{2};  ///< last, as its threads use the above; two, as one may copy while the other waits
};

}  // namespace dynswap
