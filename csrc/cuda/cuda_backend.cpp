// The backend over one GPU: a copy stream, events, and nothing that makes the host wait.
#include "cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/protection.h"
#include "cuda/context.h"
#include "cuda/copy_issuer.h"
#include "cuda/cuda_check.h"
#include "cuda/events.h"
#include "platform/fork_safe.h"
#include "transfer/staging.h"

namespace dynswap {
namespace {

constexpr std::size_t kLeastStaging = 1u << 20;
constexpr auto kPatience = std::chrono::milliseconds(100);

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(CudaOptions options);
  ~CudaBackend() override;

  const char* name() const noexcept override { return "cuda"; }
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
  void synchronise(const EventPtr& event) noexcept override;
  std::uint64_t host_synchronisations() const noexcept override { return host_synchronisations_; }

 private:
  /// Keeps what a copy reads until it is over.
  struct InFlight {
    std::shared_ptr<CudaEvent> copied;
    std::vector<Step> steps;
  };

  /// Deletes memory by letting it go, and knows the stream in whose order its allocator hands it out again.
  struct Allocated {
    Memory memory;
    Stream stream;
    void operator()(std::byte*) noexcept { memory.reset(); }
  };

  cudaStream_t handle_of(Stream stream) const {
    return reinterpret_cast<cudaStream_t>(options_.native_handle ? options_.native_handle(stream) : stream);
  }
  std::shared_ptr<const DeviceClock> clock() const;
  void wait_for_stream() noexcept;
  void wait_for_reads(const CudaEvent& copied);
  void reap() noexcept;

  const CudaOptions options_;
  const std::shared_ptr<const DeviceContext> context_;
  const std::shared_ptr<EventPool> events_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<CopyIssuer> issuer_;

  std::atomic<bool> closed_{false};
  std::atomic<int> copying_{0};  ///< threads inside copy()
  std::atomic<std::uint64_t> host_synchronisations_{0};

  mutable Mutex mutex_;
  std::deque<InFlight> in_flight_;            ///< LOCK: mutex_
  std::shared_ptr<const DeviceClock> clock_;  ///< LOCK: mutex_; null: times are not kept
};

CudaBackend::CudaBackend(CudaOptions options)
    : options_(std::move(options)),
      context_(std::make_shared<const DeviceContext>(options_.device)),
      events_(std::make_shared<EventPool>(context_)) {
  DYNSWAP_CHECK(options_.allocate, "CudaOptions::allocate is not set");
  DYNSWAP_CHECK(options_.staging_buffers >= 2 && options_.staging_bytes >= kLeastStaging,
                "the staging ring takes two buffers of 1 MiB at least");
  const ContextGuard guard(*context_);
  int least = 0;
  int greatest = 0;
  DYNSWAP_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest), "");
  // Non-blocking: it shall not wait for the legacy default stream, on which models run by default.
  DYNSWAP_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
               "priority " << greatest);
  issuer_ =
      std::make_unique<CopyIssuer>(options_, stream_, [this](std::size_t bytes) { return allocate(bytes); });
}

CudaBackend::~CudaBackend() {
  if (!cuda_usable()) {
    // At exit, and in a forked child, whose threads exist no more: nothing to stop, nobody to tell.
    (void)issuer_.release();
    return;
  }
  close();
  try {
    const ContextGuard guard(*context_);
    issuer_.reset();
    DYNSWAP_CUDA_NOEXCEPT(cudaStreamDestroy(stream_));
  } catch (const std::exception&) {
    (void)issuer_.release();  // the device is lost
  }
}

Memory CudaBackend::allocate(std::size_t bytes) {
  CudaMemory block = options_.allocate(bytes);
  const ContextGuard guard(*context_);
  // A graph's own pool would have it back.
  if (is_captured(handle_of(block.stream)))
    throw DeviceError(
        "memory for weights cannot be allocated while a CUDA graph is captured: run the model once before "
        "the capture");
  // Note [Fresh memory is old memory]: a caching allocator hands out blocks whose last readers may still
  // be queued on the stream that it allocates for. Work on that stream comes after them; the copy stream
  // has to be told.
  CudaEvent freed(events_);
  freed.record(handle_of(block.stream));
  if (PROTECTED(fresh_memory_waits)) DYNSWAP_CUDA(cudaStreamWaitEvent(stream_, freed.handle(), 0), "");
  std::byte* const data = block.memory.get();
  return Memory(data, Allocated{std::move(block.memory), block.stream});
}

bool CudaBackend::release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept {
  const Allocated* const allocated = std::get_deleter<Allocated>(memory);
  if (allocated == nullptr) return memory == nullptr;
  if (!cuda_usable()) return false;
  try {
    const ContextGuard guard(*context_);
    cudaStream_t stream = handle_of(allocated->stream);
    if (is_captured(stream)) return false;
    for (const EventPtr& event : after) {
      if (!PROTECTED(plan_goes_after_readers)) break;
      if (!event || static_cast<const CudaEvent&>(*event).known_done()) continue;
      DYNSWAP_CUDA(cudaStreamWaitEvent(stream, static_cast<const CudaEvent&>(*event).handle(), 0), "");
    }
    return true;
  } catch (const std::exception&) {
    return false;  // the stream may be gone: it was the user's
  }
}

Stream CudaBackend::order_of(const Memory& memory) const noexcept {
  const Allocated* const allocated = std::get_deleter<Allocated>(memory);
  return allocated == nullptr ? 0 : allocated->stream;
}

EventPtr CudaBackend::copy(CopyRequest request) {
  struct Counted {
    std::atomic<int>& count;
    explicit Counted(std::atomic<int>& copying) : count(copying) { ++count; }
    ~Counted() { --count; }
  };
  const Counted counted(copying_);
  if (closed_) throw ClosedError("the backend is closed");
  reap();
  const ContextGuard guard(*context_);
  const std::shared_ptr<const DeviceClock> timed_by = clock();
  auto copied = std::make_shared<CudaEvent>(events_, timed_by);
  try {
    if (timed_by) {
      // The copy's time is not that of the readers which it waits for.
      if (!request.steps.empty()) issuer_->wait_for(request.steps.front().after);
      auto begin = std::make_shared<CudaEvent>(events_, timed_by);
      begin->record(stream_);
      copied->begin = std::move(begin);
    }
    copied->reads = issuer_->issue(request);
    copied->record(stream_);
  } catch (...) {
    // What was enqueued before the error must not outlive the request.
    wait_for_stream();
    throw;
  }
  for (Step& step : request.steps) step.after.clear();
  const std::lock_guard lock(mutex_);
  in_flight_.push_back({copied, std::move(request.steps)});
  return copied;
}

void CudaBackend::wait(Stream consumer, const EventPtr& copied) {
  if (!copied) return;
  const auto& event = static_cast<const CudaEvent&>(*copied);
  if (event.reads && PROTECTED(failed_read_told)) wait_for_reads(event);
  if (event.known_done()) return;
  const ContextGuard guard(*context_);
  if (is_captured(handle_of(consumer))) {
    // See Note [Somebody captures a graph]; replays will find it there.
    if (event.done()) return;
    ++host_synchronisations_;
    DYNSWAP_CUDA(cudaEventSynchronize(event.handle()), "");
    return;
  }
  DYNSWAP_CUDA(cudaStreamWaitEvent(handle_of(consumer), event.handle(), 0), "stream " << consumer);
}

/// Note [A read can fail after its copy was issued]: the consumer's work would then run over bytes that
/// never came, and the error would be known too late. So wait() blocks the calling thread until the reads
/// (not the copies) of a staged copy are over, and throws what went wrong. Prefetched reads are over by
/// then, or the disk is the limit. The engine counts the time as a stall; it is no synchronisation with
/// the device. Copies of pinned sources have no reads.
void CudaBackend::wait_for_reads(const CudaEvent& copied) {
  while (!issuer_->wait(*copied.reads, kPatience)) {
    // The driver calls no host function after a device error, so reads that wait for one never begin.
    const ContextGuard guard(*context_);
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      continue;
    }
    if (state != cudaSuccess) throw_cuda_error(state, "cudaStreamQuery", "the copy stream");
  }
}

EventPtr CudaBackend::record(Stream consumer) {
  const ContextGuard guard(*context_);
  auto event = std::make_shared<CudaEvent>(events_);
  event->record(handle_of(consumer));
  return event;
}

bool CudaBackend::capturing(Stream consumer) const noexcept {
  if (!cuda_usable()) return false;
  try {
    const ContextGuard guard(*context_);
    return is_captured(handle_of(consumer));
  } catch (const std::exception&) {
    return false;  // the device is lost
  }
}

void CudaBackend::keep_times(bool keep) {
  if (closed_ || !cuda_usable()) return;
  if (keep) ++host_synchronisations_;
  auto started = keep ? std::make_shared<const DeviceClock>(context_, stream_) : nullptr;
  const std::lock_guard lock(mutex_);
  clock_.swap(started);
}

std::shared_ptr<const DeviceClock> CudaBackend::clock() const {
  const std::lock_guard lock(mutex_);
  return clock_;
}

EventPtr CudaBackend::mark(Stream consumer) {
  std::shared_ptr<const DeviceClock> timed_by = clock();
  if (!timed_by) return nullptr;
  const ContextGuard guard(*context_);
  if (is_captured(handle_of(consumer))) return nullptr;
  auto event = std::make_shared<CudaEvent>(events_, std::move(timed_by));
  event->record(handle_of(consumer));
  return event;
}

void CudaBackend::synchronise(const EventPtr& event) noexcept {
  if (!event || event->done() || !cuda_usable()) return;
  ++host_synchronisations_;
  try {
    const ContextGuard guard(*context_);
    DYNSWAP_CUDA_NOEXCEPT(cudaEventSynchronize(static_cast<const CudaEvent&>(*event).handle()));
  } catch (const std::exception&) {
    // the device is lost: nothing is under way any more
  }
}

void CudaBackend::wait_for_stream() noexcept {
  ++host_synchronisations_;
  try {
    const ContextGuard guard(*context_);
    DYNSWAP_CUDA_NOEXCEPT(cudaStreamSynchronize(stream_));
  } catch (const std::exception&) {
    // the device is lost: nothing is under way any more
  }
}

/// Lets go of the sources of copies that are over. On a thread that issues copies, because the last owner
/// of a master's memory must not be the driver's thread, where no call is allowed.
void CudaBackend::reap() noexcept {
  std::deque<InFlight> taken;
  {
    const std::lock_guard lock(mutex_);
    taken.swap(in_flight_);
  }
  // The stream is in order: the first that is not over ends the search.
  while (!taken.empty() && taken.front().copied->done()) taken.pop_front();
  if (taken.empty()) return;
  const std::lock_guard lock(mutex_);
  in_flight_.insert(in_flight_.begin(), std::make_move_iterator(taken.begin()),
                    std::make_move_iterator(taken.end()));
}

void CudaBackend::close() noexcept {
  if (closed_.exchange(true) || !cuda_usable()) return;
  issuer_->close();  // reads that have not begun fail, so nothing below waits for a disk
  while (copying_ > 0) std::this_thread::yield();
  if (PROTECTED(close_waits)) wait_for_stream();
  issuer_->release_scratch();  // a handle may outlive its install
  reap();
}

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(CudaOptions options) {
  return std::make_unique<CudaBackend>(std::move(options));
}

int cuda_device_count() {
  if (!cuda_usable())
    throw DeviceError("CUDA cannot be used in a process that was forked from one that had used it");
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  watch_process();
  if (error == cudaErrorNoDevice) {
    (void)cudaGetLastError();
    return 0;
  }
  if (error != cudaSuccess) throw_cuda_error(error, "cudaGetDeviceCount", "");
  return devices;
}

namespace {

constexpr LinkedCuda kLinked{&make_cuda_backend, &pin, &cuda_device_count, CUDART_VERSION};
[[maybe_unused]] const bool is_linked = [] {
  linked_cuda = &kLinked;
  return true;
}();

}  // namespace

}  // namespace dynswap
