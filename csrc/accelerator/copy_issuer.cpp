#include "accelerator/copy_issuer.h"

#include <c10/core/StreamGuard.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <utility>

#include "accelerator/capabilities.h"
#include "accelerator/copies.h"
#include "accelerator/device_runtime.h"
#include "accelerator/pinned_memory.h"
#include "accelerator/torch_calls.h"
#include "core/protection.h"
#include "io/worker_pool.h"
#include "transfer/usable_devices.h"

namespace dynswap {

namespace {

constexpr auto kPatience = std::chrono::milliseconds(100);

}  // namespace

/// The thread that issues copies later, and its ring of buffers. Made when first needed.
struct TorchCopyIssuer::Deferred {
  explicit Deferred(std::unique_ptr<StagingRing> staging) : ring(std::move(staging)) {}
  std::unique_ptr<StagingRing> ring;
  /// Chunks whose copies may not be over, in order. Used by the thread only.
  std::deque<std::pair<std::uint64_t, TorchEventPtr>> copying;
  WorkerPool thread{1};  ///< last: it uses the above
};

TorchCopyIssuer::TorchCopyIssuer(const TorchBackendOptions& options, std::shared_ptr<TorchEventPool> events,
                                 const c10::Stream& stream, std::atomic<std::uint64_t>& host_synchronisations)
    : options_(options),
      events_(std::move(events)),
      stream_(stream),
      pinned_(has_pinned_memory(options_.device)),
      host_synchronisations_(host_synchronisations) {}

TorchCopyIssuer::~TorchCopyIssuer() = default;

void TorchCopyIssuer::abandon() noexcept { (void)deferred_.release(); }

/// Note [A copy that is issued later]: torch has no call by which a stream waits for the host. So a copy
/// whose bytes have to be read first is enqueued by a thread of ours, in its turn, when they are there. A
/// later copy that writes to the same place is given to the same thread as long as the first has not been
/// enqueued, because the first one's event is not a point of any stream yet. A consumer that is made to wait
/// for such a copy blocks until it has been enqueued, not until it is over. The CUDA backend blocks it for
/// its own reason: see Note [A read can fail after its copy was issued].
void TorchCopyIssuer::issue(const CopyRequest& request, const TorchEventPtr& copied) {
  const bool staged = needs_of(request, /*device_casts=*/true).staging;
  bool later = staged;
  for (const Step& step : request.steps) {
    for (const EventPtr& event : step.after) later = later || (event && !as_torch(event).recorded());
  }
  if (later) {
    issue_later(request, copied, staged);
  } else {
    issue_now(request, *copied);
  }
}

void TorchCopyIssuer::issue_now(const CopyRequest& request, TorchEvent& copied) {
  std::vector<CopyBatch> batches = plan_copies(request, /*device_casts=*/true, nullptr, nullptr);
  try {
    enqueue(batches, copied, nullptr);
  } catch (...) {
    // What was enqueued before the error must not outlive the request.
    wait_for_stream();
    throw;
  }
}

void TorchCopyIssuer::issue_later(const CopyRequest& request, const TorchEventPtr& copied, bool staged) {
  Deferred& later = deferred();
  if (staged) copied->reads = std::make_shared<Reads>();
  const std::lock_guard lock(queueing_);
  // Shared, as a std::function is copied.
  const auto batches = std::make_shared<std::vector<CopyBatch>>(
      plan_copies(request, /*device_casts=*/true, later.ring.get(), copied->reads));
  const auto run = [this, &later, batches, copied] {
    try {
      enqueue(*batches, *copied, &later);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      wait_for_stream();
      give_up(*batches, *copied, error, &later);
    }
  };
  const auto cancel = [this, batches, copied] {
    give_up(*batches, *copied,
            std::make_exception_ptr(ClosedError("the backend was closed before the weight was copied")),
            nullptr);
  };
  if (!later.thread.submit({run, cancel})) {
    cancel();
    throw ClosedError("the backend is closed");
  }
}

/// Completes a copy that failed, of which nothing is under way on the copy stream. `staged`: its chunks that
/// were not enqueued are to be passed over; null once the readers are closed.
void TorchCopyIssuer::give_up(std::vector<CopyBatch>& batches, TorchEvent& copied, std::exception_ptr error,
                              Deferred* staged) noexcept {
  for (const CopyBatch& batch : batches) {
    // Who has the memory next waits for this copy only, so what this one waits for has to be over. An event
    // that is not recorded is that of a copy before this one in the queue, which did or does the same.
    for (const EventPtr& event : batch.after) {
      if (event && as_torch(event).recorded()) synchronise(event);
    }
  }
  if (staged != nullptr && copied.reads) {
    // What of it was enqueued is over, and the rest will not be: later chunks may have its buffers.
    staged->ring->give_up(*copied.reads);
    staged->copying.clear();
    for (const CopyBatch& batch : batches) {
      if (batch.chunk) staged->ring->passed(*batch.chunk + 1);
    }
  }
  batches.clear();
  copied.fail(std::move(error));
}

/// Enqueues what was planned, then records `copied`. Clears `batches` before that, so that the last reference
/// to what they keep alive is dropped by a thread that calls copy().
void TorchCopyIssuer::enqueue(std::vector<CopyBatch>& batches, TorchEvent& copied, Deferred* staged) {
  torch_calls([&] {
    const RelaxedCapture relaxed;
    const c10::StreamGuard guard(stream_);
    const CopyStream copies(options_.device, /*non_blocking=*/pinned_);
    bool first = true;
    for (CopyBatch& batch : batches) {
      for (const EventPtr& event : batch.after) {
        if (!event) continue;
        try {
          as_torch(event).wait_for_record();  // of an earlier one in this thread's queue
        } catch (const std::exception&) {
          continue;  // it failed, and nothing of it is under way
        }
        as_torch(event).block(stream_);
      }
      if (std::exchange(first, false) && copied.clock()) {
        // Begins after the waits: the time of the readers that it waits for is not part of the copy's.
        auto begin = std::make_shared<TorchEvent>(events_, copied.clock());
        begin->record(stream_);
        copied.begin = std::move(begin);
      }
      if (batch.chunk) {
        make_room(*staged, *batch.chunk);
        staged->ring->await(*batch.chunk);
      }
      for (const Landing& landing : batch.landings) copies.enqueue(landing);
      if (batch.chunk) {
        auto over = std::make_shared<TorchEvent>(events_);
        over->record(stream_);
        staged->copying.emplace_back(*batch.chunk, std::move(over));
      }
    }
  });
  batches.clear();
  copied.record(stream_);
}

/// Lets the reads of what comes after `chunk` begin. Up to half of the buffers may be on their way to the
/// device while the other half is read into; for older copies this thread waits.
void TorchCopyIssuer::make_room(Deferred& staged, std::uint64_t chunk) {
  auto& copying = staged.copying;
  const std::uint64_t under_way = staged.ring->buffers() / 2;
  while (!copying.empty()) {
    const auto& [oldest, over] = copying.front();
    if (!over->done()) {
      if (chunk - oldest < under_way) break;
      if (PROTECTED(staged_read_waits)) over->synchronise();
    }
    copying.pop_front();
  }
  staged.ring->passed(copying.empty() ? chunk : copying.front().first);
}

TorchCopyIssuer::Deferred& TorchCopyIssuer::deferred() {
  {
    const std::lock_guard lock(setup_);
    if (deferred_) return *deferred_;
  }
  const RelaxedCapture relaxed;
  const std::shared_ptr<std::byte> block =
      staging_memory(options_.device, pinned_, options_.staging_bytes * options_.staging_buffers);
  std::vector<StagingRing::Buffer> buffers;
  for (unsigned i = 0; i < options_.staging_buffers; ++i) {
    buffers.emplace_back(block, block.get() + i * options_.staging_bytes);
  }
  auto made = std::make_unique<Deferred>(std::make_unique<StagingRing>(
      std::move(buffers), options_.staging_bytes, static_cast<int>(options_.readers), options_.cast));
  const std::lock_guard lock(setup_);
  if (!deferred_) deferred_.swap(made);
  return *deferred_;
}

void TorchCopyIssuer::synchronise(const EventPtr& event) noexcept {
  if (!event || event->done() || !devices_usable()) return;
  ++host_synchronisations_;
  try {
    as_torch(event).wait_for_record();
    as_torch(event).synchronise();
  } catch (const std::exception&) {
    // it failed, or the device is lost: nothing of it is under way any more
  }
}

void TorchCopyIssuer::wait_for_stream() noexcept {
  ++host_synchronisations_;
  try {
    const RelaxedCapture relaxed;
    guard_of(options_.device).synchronizeStream(stream_);
  } catch (const std::exception&) {
    // the device is lost: nothing is under way any more
  }
}

void TorchCopyIssuer::wait(const Reads& reads) {
  while (!deferred().ring->wait(reads, kPatience)) {
  }
}

void TorchCopyIssuer::close() noexcept {
  Deferred* later = nullptr;
  {
    const std::lock_guard lock(setup_);
    later = deferred_.get();
  }
  if (later == nullptr) return;
  later->ring->close();  // reads that have not begun fail, so nothing that follows waits for a disk
  later->thread.close();
}

}  // namespace dynswap
