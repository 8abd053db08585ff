// The backend over torch's streams: memory, a copy stream, and events.
#include "accelerator/torch_backend.h"

#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "accelerator/capabilities.h"
#include "accelerator/copy_issuer.h"
#include "accelerator/device_runtime.h"
#include "accelerator/events.h"
#include "accelerator/torch_calls.h"
#include "core/check.h"
#include "core/protection.h"
#include "platform/fork_safe.h"
#include "transfer/usable_devices.h"

namespace dynswap {
namespace {

constexpr std::size_t kLeastStaging = 1u << 20;

class TorchBackend final : public Backend {
 public:
  explicit TorchBackend(TorchBackendOptions options);
  ~TorchBackend() override;

  const char* name() const noexcept override { return "torch"; }
  const DeviceTraits& traits() const noexcept override { return kAcceleratorTraits; }
  Memory allocate(std::size_t bytes) override;
  bool release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept override;
  Stream order_of(const Memory& memory) const noexcept override;
  EventPtr copy(CopyRequest request) override;
  void wait(Stream consumer, const EventPtr& copied) override;
  EventPtr record(Stream consumer) override;
  bool capturing(Stream consumer) const noexcept override;
  void keep_times(bool keep) override;
  bool device_time() const noexcept override { return true; }
  EventPtr mark(Stream consumer) override;
  void close() noexcept override;
  void synchronise(const EventPtr& event) noexcept override { issuer_.synchronise(event); }
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

  c10::Stream consumer_of(Stream consumer) const {
    return c10::Stream(c10::Stream::UNSAFE, options_.device, static_cast<c10::StreamId>(consumer));
  }
  std::shared_ptr<const TorchClock> clock() const;
  void keep(const TorchEventPtr& copied, std::vector<Step> steps);
  void reap() noexcept;

  const TorchBackendOptions options_;
  const std::shared_ptr<TorchEventPool> events_;
  const c10::Stream stream_;

  std::atomic<bool> closed_{false};
  std::atomic<int> copying_{0};  ///< threads inside copy()
  std::atomic<std::uint64_t> host_synchronisations_{0};

  mutable Mutex mutex_;
  std::deque<InFlight> in_flight_;           ///< LOCK: mutex_
  std::shared_ptr<const TorchClock> clock_;  ///< LOCK: mutex_; null: times are not kept

  TorchCopyIssuer issuer_;  ///< last: its thread uses the above
};

TorchBackend::TorchBackend(TorchBackendOptions options)
    : options_(std::move(options)),
      events_(std::make_shared<TorchEventPool>(options_.device.type())),
      stream_(torch_calls([&] { return copy_stream(options_.device); })),
      issuer_(options_, events_, stream_, host_synchronisations_) {
  DYNSWAP_CHECK(options_.allocate, "TorchBackendOptions::allocate is not set");
  DYNSWAP_CHECK(options_.staging_buffers >= 2 && options_.staging_bytes >= kLeastStaging,
                "the staging ring takes two buffers of 1 MiB at least");
  watch_process();
}

TorchBackend::~TorchBackend() {
  if (!devices_usable()) {
    issuer_.abandon();
  } else {
    close();
  }
}

Memory TorchBackend::allocate(std::size_t bytes) {
  const RelaxedCapture relaxed;
  auto [block, stream] = options_.allocate(bytes);
  // The block is from the graph's own pool, which takes it back.
  if (is_captured(stream))
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
    if (is_captured(allocated->stream)) return false;
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

Stream TorchBackend::order_of(const Memory& memory) const noexcept {
  const Allocated* const allocated = std::get_deleter<Allocated>(memory);
  return allocated == nullptr ? 0 : static_cast<Stream>(allocated->stream.id());
}

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
  issuer_.issue(request, copied);
  keep(copied, std::move(request.steps));
  return copied;
}

void TorchBackend::wait(Stream consumer, const EventPtr& copied) {
  if (!copied) return;
  const TorchEvent& event = as_torch(copied);
  if (event.reads && PROTECTED(failed_read_told)) issuer_.wait(*event.reads);
  event.wait_for_record();  // throws what made the copy fail
  if (event.known_done()) return;
  const c10::Stream stream = consumer_of(consumer);
  if (is_captured(stream)) {
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
    return is_captured(consumer_of(consumer));
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
  issuer_.close();
  while (copying_ > 0) std::this_thread::yield();
  if (PROTECTED(close_waits)) issuer_.wait_for_stream();
  reap();
}

}  // namespace

std::unique_ptr<Backend> make_torch_backend(TorchBackendOptions options) {
  return std::make_unique<TorchBackend>(std::move(options));
}

}  // namespace dynswap
