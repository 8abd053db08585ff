// Enqueues copies on torch's copy stream.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "accelerator/events.h"
#include "accelerator/torch_backend.h"
#include "core/backend.h"
#include "platform/fork_safe.h"
#include "transfer/copy_plan.h"
#include "transfer/staging.h"

namespace dynswap {

/// Thread-safe.
class TorchCopyIssuer {
 public:
  /// The options and `host_synchronisations`, which counts what the host waits for, outlive this object.
  TorchCopyIssuer(const TorchBackendOptions& options, std::shared_ptr<TorchEventPool> events,
                  const c10::Stream& stream, std::atomic<std::uint64_t>& host_synchronisations);
  ~TorchCopyIssuer();
  TorchCopyIssuer(const TorchCopyIssuer&) = delete;
  TorchCopyIssuer& operator=(const TorchCopyIssuer&) = delete;

  /// Enqueues the request, now or when its bytes have been read, and records `copied` after it. If it throws,
  /// nothing of the request is under way any more.
  void issue(const CopyRequest& request, const TorchEventPtr& copied);

  /// Waits until what a copy reads has been read, or could not be.
  void wait(const Reads& reads);
  /// Waits until the event is over, if it is to come.
  void synchronise(const EventPtr& event) noexcept;
  /// Waits for all that is on the stream.
  void wait_for_stream() noexcept;

  /// Fails what was not enqueued. The stream is to be waited for after it and before this object goes.
  void close() noexcept;
  /// Leaves the thread behind: at exit, or in a forked child, which does not have it.
  void abandon() noexcept;

 private:
  struct Deferred;

  Deferred& deferred();
  void issue_now(const CopyRequest& request, TorchEvent& copied);
  void issue_later(const CopyRequest& request, const TorchEventPtr& copied, bool staged);
  void enqueue(std::vector<CopyBatch>& batches, TorchEvent& copied, Deferred* staged);
  void make_room(Deferred& staged, std::uint64_t chunk);
  void give_up(std::vector<CopyBatch>& batches, TorchEvent& copied, std::exception_ptr error,
               Deferred* staged) noexcept;

  const TorchBackendOptions& options_;
  const std::shared_ptr<TorchEventPool> events_;
  const c10::Stream stream_;
  const bool pinned_;  ///< the device has pinned memory
  std::atomic<std::uint64_t>& host_synchronisations_;

  /// Taken first; held while chunks are added and their copies queued, which is to be in one order. No call
  /// of torch's is made under it.
  Mutex queueing_;

  Mutex setup_;
  std::unique_ptr<Deferred> deferred_;  ///< LOCK: setup_; does not change once it is set, until the end
};

}  // namespace dynswap
