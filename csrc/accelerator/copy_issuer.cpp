#include "accelerator/copy_issuer.h"

#include <c10/core/StreamGuard.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <utility>

#include "accelerator/copies.h"
#include "accelerator/decode.h"
#include "accelerator/pinned_memory.h"
#include "accelerator/torch_calls.h"
#include "accelerator/torch_device.h"
#include "core/protection.h"
#include "io/worker_pool.h"

namespace dynswap {

namespace {

constexpr auto kPatience = std::chrono::milliseconds(100);

}  // namespace

/// The thread that issues copies later, and its ring of buffers. Made when first needed.
struct TorchCopyIssuer::Deferred {
  explicit Deferred(std::unique_ptr<StagingRing> staging) : ring(std::move(staging)) {}
  std::unique_ptr<StagingRing> ring;
  /// Chunks whose copies may not be over, in order. Used by the thread only.
  std::deque<std::pair<std::uint64_t, StreamEventPtr>> copying;
  WorkerPool thread{1};  ///< last: it uses the above
};

TorchCopyIssuer::TorchCopyIssuer(const c10::Device& device, std::shared_ptr<TransferStream> stream)
    : device_(device), stream_(std::move(stream)), pinned_(has_pinned_memory(device)) {}

TorchCopyIssuer::~TorchCopyIssuer() = default;

/// Note [A copy that is issued later]: torch has no call by which a stream waits for the host. So a copy
/// whose bytes have to be read first is enqueued by a thread of ours, in its turn, when they are there. A
/// later copy that writes to the same place is given to the same thread as long as the first has not been
/// enqueued, because the first one's event is not a point of any stream yet. A consumer that is made to wait
/// for such a copy blocks until it has been enqueued, not until it is over. The CUDA backend blocks it for
/// its own reason: see Note [A read can fail after its copy was issued].
void TorchCopyIssuer::issue(const CopyRequest& request, const StreamEventPtr& copied) {
  const DeviceAbilities device = abilities_for(request);
  bool later = needs_of(request, device).staging;
  for (const Step& step : request.steps) {
    for (const EventPtr& event : step.after) later = later || (event && !on_stream(event).recorded());
  }
  if (later) return issue_later(request, copied, device);
  std::vector<CopyBatch> batches = plan_copies(request, device, nullptr, nullptr);
  enqueue(batches, *copied, nullptr);
}

DeviceAbilities TorchCopyIssuer::abilities_for(const CopyRequest& request) {
  for (const Step& step : request.steps) {
    for (const Piece& piece : step.pieces) {
      if (!piece.source->coding) continue;
      const std::lock_guard lock(setup_);
      if (!decodes_) decodes_ = decodes(device_);
      return {.decodes = *decodes_};
    }
  }
  return {};
}

void TorchCopyIssuer::issue_later(const CopyRequest& request, const StreamEventPtr& copied,
                                  DeviceAbilities device) {
  Deferred& later = deferred();
  const bool staged = needs_of(request, device).staging;
  if (staged) copied->reads = std::make_shared<Reads>();
  const std::lock_guard lock(queueing_);
  // Shared, as a std::function is copied.
  const auto batches =
      std::make_shared<std::vector<CopyBatch>>(plan_copies(request, device, later.ring.get(), copied->reads));
  const auto run = [this, &later, batches, copied] {
    try {
      enqueue(*batches, *copied, &later);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      stream_->synchronise();
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
void TorchCopyIssuer::give_up(std::vector<CopyBatch>& batches, StreamEvent& copied, std::exception_ptr error,
                              Deferred* staged) noexcept {
  for (const CopyBatch& batch : batches) {
    // Who has the memory next waits for this copy only, so what this one waits for has to be over. An event
    // that is not recorded is that of a copy before this one in the queue, which did or does the same.
    for (const EventPtr& event : batch.after) {
      if (event && on_stream(event).recorded()) stream_->synchronise(event);
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
void TorchCopyIssuer::enqueue(std::vector<CopyBatch>& batches, StreamEvent& copied, Deferred* staged) {
  torch_calls([&] {
    const OnDevice scope(stream_->device());
    const c10::StreamGuard guard(TorchDevice(device_).stream(stream_->handle()));
    const CopyStream copies(device_, /*non_blocking=*/pinned_);
    bool first = true;
    for (CopyBatch& batch : batches) {
      stream_->wait_for(batch.after);  // also for an earlier one in this thread's queue
      if (std::exchange(first, false)) stream_->begin(copied);
      if (batch.chunk) {
        make_room(*staged, *batch.chunk);
        staged->ring->await(*batch.chunk);
      }
      for (const Landing& landing : batch.landings) copies.enqueue(landing);
      if (batch.chunk) {
        auto over = stream_->make_event();
        over->record(stream_->handle());
        staged->copying.emplace_back(*batch.chunk, std::move(over));
      }
    }
  });
  batches.clear();
  copied.record(stream_->handle());
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
  auto made =
      std::make_unique<Deferred>(stream_->make_ring(staging_memory(device_, pinned_, stream_->ring_bytes())));
  const std::lock_guard lock(setup_);
  if (!deferred_) deferred_.swap(made);
  return *deferred_;
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
