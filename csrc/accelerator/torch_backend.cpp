// The backend over torch's streams: a copy stream, events, and a thread for what has to be read first.
#include "accelerator/torch_backend.h"

#include <c10/core/StreamGuard.h>

#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "accelerator/capabilities.h"
#include "accelerator/copies.h"
#include "accelerator/device_runtime.h"
#include "accelerator/events.h"
#include "accelerator/pinned_memory.h"
#include "accelerator/torch_calls.h"
#include "core/check.h"
#include "core/protection.h"
#include "io/worker_pool.h"
#include "transfer/copy_plan.h"
#include "transfer/process.h"
#include "transfer/staging.h"

namespace dynswap {
namespace {

constexpr std::size_t kLeastStaging = 1u << 20;
constexpr auto kPatience = std::chrono::milliseconds(100);

using TorchEventPtr = std::shared_ptr<TorchEvent>;

const TorchEvent& as_torch(const EventPtr& event) { return static_cast<const TorchEvent&>(*event); }

class TorchBackend final : public Backend {
 public:
  explicit TorchBackend(TorchBackendOptions options);
  ~TorchBackend() override;

  const char* name() const noexcept override { return "torch"; }
  std::size_t alignment() const noexcept override { return kAcceleratorLayout.alignment; }
  std::size_t weight_alignment() const noexcept override { return kAcceleratorLayout.weight_alignment; }
  Memory allocate(std::size_t bytes) override;
  bool release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept override;
  EventPtr copy(CopyRequest request) override;
  void wait(Stream consumer, const EventPtr& copied) override;
  EventPtr record(Stream consumer) override;
  bool capturing(Stream consumer) const noexcept override;
  void keep_times(bool keep) override;
  bool device_time() const noexcept override { return true; }
  EventPtr mark(Stream consumer) override;
  void close() noexcept override;
  void synchronise(const EventPtr& event) noexcept override;
  std::uint64_t host_synchronisations() const noexcept override { return host_synchronisations_; }

 private:
  /// Keeps what a copy reads until it is over.
  struct InFlight {
    TorchEventPtr copied;
    std::vector<Step> steps;
  };

  /// A deleter that frees the memory, and knows the stream in whose order the allocator hands it out again.
  struct Allocated {
    Memory memory;
    c10::Stream stream;
    void operator()(std::byte*) noexcept { memory.reset(); }
  };

  /// The thread that issues copies later, and its ring of buffers. Made when first needed.
  struct Deferred {
    explicit Deferred(std::unique_ptr<StagingRing> staging) : ring(std::move(staging)) {}
    std::unique_ptr<StagingRing> ring;
    /// Chunks whose copies may not be over, in order. Used by the thread only.
    std::deque<std::pair<std::uint64_t, TorchEventPtr>> copying;
    WorkerPool thread{1};  ///< last: it uses the above
  };

  c10::Stream consumer_of(Stream consumer) const {
    return c10::Stream(c10::Stream::UNSAFE, options_.device, static_cast<c10::StreamId>(consumer));
  }
  bool captured(const c10::Stream& stream) const { return options_.captured && options_.captured(stream); }
  std::shared_ptr<const TorchClock> clock() const;
  Deferred& deferred();
  void issue_now(const CopyRequest& request, TorchEvent& copied);
  void issue_later(const CopyRequest& request, const TorchEventPtr& copied, bool staged);
  void issue(std::vector<CopyBatch>& batches, TorchEvent& copied, Deferred* staged);
  void make_room(Deferred& staged, std::uint64_t chunk);
  void give_up(std::vector<CopyBatch>& batches, TorchEvent& copied, std::exception_ptr error,
               Deferred* staged) noexcept;
  void keep(const TorchEventPtr& copied, std::vector<Step> steps);
  void wait_for_stream() noexcept;
  void reap() noexcept;

  const TorchBackendOptions options_;
  const std::shared_ptr<TorchEventPool> events_;
  const c10::Stream stream_;
  const bool pinned_;  ///< the device has pinned memory

  std::atomic<bool> closed_{false};
  std::atomic<int> copying_{0};  ///< threads inside copy()
  std::atomic<std::uint64_t> host_synchronisations_{0};

  /// Taken first; held while chunks are added and their copies queued, which is to be in one order. No call
  /// of torch's is made under it.
  std::mutex queueing_;

  mutable std::mutex mutex_;
  std::deque<InFlight> in_flight_;           ///< LOCK: mutex_
  std::shared_ptr<const TorchClock> clock_;  ///< LOCK: mutex_; null: times are not kept
  std::unique_ptr<Deferred> deferred_;       ///< LOCK: mutex_; does not change once it is set, until the end
};

TorchBackend::TorchBackend(TorchBackendOptions options)
    : options_(std::move(options)),
      events_(std::make_shared<TorchEventPool>(options_.device.type())),
      stream_(torch_calls([&] { return copy_stream(options_.device); })),
      pinned_(has_pinned_memory(options_.device)) {
  DYNSWAP_CHECK(options_.allocate, "TorchBackendOptions::allocate is not set");
  DYNSWAP_CHECK(options_.staging_buffers >= 2 && options_.staging_bytes >= kLeastStaging,
                "the staging ring takes two buffers of 1 MiB at least");
  watch_process();
}

TorchBackend::~TorchBackend() {
  if (!devices_usable()) {
    // At exit, or in a forked child, which does not have the threads: there is nothing to stop.
    (void)deferred_.release();
    return;
  }
  close();
}

Memory TorchBackend::allocate(std::size_t bytes) {
  const RelaxedCapture relaxed;
  auto [block, stream] = options_.allocate(bytes);
  // The block is from the graph's own pool, which takes it back.
  if (captured(stream))
    throw DeviceError(
        "memory for weights cannot be allocated while a CUDA graph is captured: run the model once before "
        "the capture");
  // See Note [Fresh memory is old memory]
  TorchEvent freed(events_);
  freed.record(stream);
  if (PROTECTED(fresh_memory_waits)) freed.block(stream_);
  std::byte* const data = block.get();
  return Memory(data, Allocated{std::move(block), stream});
}

bool TorchBackend::release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept {
  const Allocated* const allocated = std::get_deleter<Allocated>(memory);
  if (allocated == nullptr) return memory == nullptr;
  if (!devices_usable()) return false;
  try {
    if (captured(allocated->stream)) return false;
    for (const EventPtr& event : after) {
      if (!PROTECTED(plan_goes_after_readers)) break;
      if (!event || as_torch(event).known_done()) continue;
      if (!as_torch(event).recorded()) return false;
      as_torch(event).block(allocated->stream);
    }
    return true;
  } catch (const std::exception&) {
    return false;  // the stream may be gone: it was the user's
  }
}

/// Note [A copy that is issued later]: torch has no call by which a stream waits for the host. So a copy
/// whose bytes have to be read first is enqueued by a thread of ours, in its turn, when they are there. A
/// later copy that writes to the same place is given to the same thread as long as the first has not been
/// enqueued, because the first one's event is not a point of any stream yet. A consumer that is made to wait
/// for such a copy blocks until it has been enqueued, not until it is over. The CUDA backend blocks it for
/// its own reason: see Note [A read can fail after its copy was issued].
EventPtr TorchBackend::copy(CopyRequest request) {
  struct Counted {
    std::atomic<int>& count;
    explicit Counted(std::atomic<int>& copying) : count(copying) { ++count; }
    ~Counted() { --count; }
  };
  const Counted counted(copying_);
  if (closed_) throw ClosedError("the backend is closed");
  reap();
  refresh_pinned_copies(request);
  auto copied = std::make_shared<TorchEvent>(events_, clock());
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
  keep(copied, std::move(request.steps));
  return copied;
}

void TorchBackend::issue_now(const CopyRequest& request, TorchEvent& copied) {
  std::vector<CopyBatch> batches = plan_copies(request, /*device_casts=*/true, nullptr, nullptr);
  try {
    issue(batches, copied, nullptr);
  } catch (...) {
    // What was enqueued before the error must not outlive the request.
    wait_for_stream();
    throw;
  }
}

void TorchBackend::issue_later(const CopyRequest& request, const TorchEventPtr& copied, bool staged) {
  Deferred& later = deferred();
  if (staged) copied->reads = std::make_shared<Reads>();
  const std::lock_guard lock(queueing_);
  // Shared, as a std::function is copied.
  const auto batches = std::make_shared<std::vector<CopyBatch>>(
      plan_copies(request, /*device_casts=*/true, later.ring.get(), copied->reads));
  const auto run = [this, &later, batches, copied] {
    try {
      issue(*batches, *copied, &later);
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
void TorchBackend::give_up(std::vector<CopyBatch>& batches, TorchEvent& copied, std::exception_ptr error,
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
void TorchBackend::issue(std::vector<CopyBatch>& batches, TorchEvent& copied, Deferred* staged) {
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
void TorchBackend::make_room(Deferred& staged, std::uint64_t chunk) {
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

void TorchBackend::wait(Stream consumer, const EventPtr& copied) {
  if (!copied) return;
  const TorchEvent& event = as_torch(copied);
  if (event.reads && PROTECTED(failed_read_told)) {
    while (!deferred().ring->wait(*event.reads, kPatience)) {
    }
  }
  event.wait_for_record();  // throws what made the copy fail
  if (event.known_done()) return;
  const c10::Stream stream = consumer_of(consumer);
  if (captured(stream)) {
    ++host_synchronisations_;
    event.synchronise();
    return;
  }
  event.block(stream);
}

EventPtr TorchBackend::record(Stream consumer) {
  auto event = std::make_shared<TorchEvent>(events_);
  event->record(consumer_of(consumer));
  return event;
}

bool TorchBackend::capturing(Stream consumer) const noexcept {
  if (!devices_usable()) return false;
  try {
    return captured(consumer_of(consumer));
  } catch (const std::exception&) {
    return false;  // the device is lost, or knows no captures
  }
}

void TorchBackend::keep_times(bool keep) {
  if (closed_ || !devices_usable()) return;
  if (keep) ++host_synchronisations_;
  auto started = keep ? std::make_shared<const TorchClock>(stream_) : nullptr;
  const std::lock_guard lock(mutex_);
  clock_.swap(started);
}

std::shared_ptr<const TorchClock> TorchBackend::clock() const {
  const std::lock_guard lock(mutex_);
  return clock_;
}

EventPtr TorchBackend::mark(Stream consumer) {
  std::shared_ptr<const TorchClock> timed_by = clock();
  if (!timed_by || capturing(consumer)) return nullptr;
  auto event = std::make_shared<TorchEvent>(events_, std::move(timed_by));
  event->record(consumer_of(consumer));
  return event;
}

TorchBackend::Deferred& TorchBackend::deferred() {
  {
    const std::lock_guard lock(mutex_);
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
  const std::lock_guard lock(mutex_);
  if (!deferred_) deferred_.swap(made);
  return *deferred_;
}

void TorchBackend::synchronise(const EventPtr& event) noexcept {
  if (!event || event->done() || !devices_usable()) return;
  ++host_synchronisations_;
  try {
    as_torch(event).wait_for_record();
    as_torch(event).synchronise();
  } catch (const std::exception&) {
    // it failed, or the device is lost: nothing of it is under way any more
  }
}

void TorchBackend::wait_for_stream() noexcept {
  ++host_synchronisations_;
  try {
    const RelaxedCapture relaxed;
    guard_of(options_.device).synchronizeStream(stream_);
  } catch (const std::exception&) {
    // the device is lost: nothing is under way any more
  }
}

void TorchBackend::keep(const TorchEventPtr& copied, std::vector<Step> steps) {
  for (Step& step : steps) step.after.clear();
  const std::lock_guard lock(mutex_);
  in_flight_.push_back({copied, std::move(steps)});
}

/// Lets go of the sources of copies that are over. The stream is in order, so the first that is not over ends
/// the search: a host that is far ahead of the device asks for one event, not for all that are under way.
void TorchBackend::reap() noexcept {
  for (;;) {
    TorchEventPtr oldest;
    {
      const std::lock_guard lock(mutex_);
      if (in_flight_.empty()) return;
      oldest = in_flight_.front().copied;
    }
    if (!oldest->done()) return;
    InFlight over;  // freed without the lock
    const std::lock_guard lock(mutex_);
    if (in_flight_.empty() || in_flight_.front().copied != oldest) continue;
    over = std::move(in_flight_.front());
    in_flight_.pop_front();
  }
}

void TorchBackend::close() noexcept {
  if (closed_.exchange(true) || !devices_usable()) return;
  Deferred* later = nullptr;
  {
    const std::lock_guard lock(mutex_);
    later = deferred_.get();
  }
  if (later != nullptr) {
    later->ring->close();  // reads that have not begun fail, so nothing below waits for a disk
    later->thread.close();
  }
  while (copying_ > 0) std::this_thread::yield();
  if (PROTECTED(close_waits)) wait_for_stream();
  reap();
}

}  // namespace

std::unique_ptr<Backend> make_torch_backend(TorchBackendOptions options) {
  return std::make_unique<TorchBackend>(std::move(options));
}

}  // namespace dynswap
