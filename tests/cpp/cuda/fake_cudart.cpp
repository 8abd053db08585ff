#include "fake_cudart.h"

#include <cudaTypedefs.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "cuda/cast_kernels.h"
#include "cuda/convert.h"
#include "random.h"
#include "transfer/copy_plan.h"

namespace {

struct Point {
  std::mutex mutex;
  std::condition_variable reached;
  bool done = false;
  std::chrono::steady_clock::time_point at;

  void reach(std::chrono::hours later = {}) {
    {
      const std::lock_guard lock(mutex);
      done = true;
      at = std::chrono::steady_clock::now() + later;
    }
    reached.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    reached.wait(lock, [&] { return done; });
  }
};

std::atomic<std::uint64_t> seeds{1};
thread_local bool in_host_function = false;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::vector<CUcontext> contexts;

}  // namespace

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<Point> point;  // of the last record
  bool timed = false;
};

struct CUctx_st {};

struct CUstream_st {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool stopping = false;
  std::atomic<bool> captured{false};
  std::thread thread{[this] { run(); }};

  ~CUstream_st() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();
  }

  void add(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex);
      queue.push_back(std::move(work));
    }
    changed.notify_all();
  }

  void run() {
    dynswap::test::Random random(seeds++);
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stopping || !queue.empty(); });
        if (queue.empty()) return;
        work = std::move(queue.front());
        queue.pop_front();
      }
      if (random.chance(0.2)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(200)));
      work();
    }
  }

  void finish() {
    const auto point = std::make_shared<Point>();
    add([point] { point->reach(); });
    point->wait();
  }
};

namespace dynswap::fake_cuda {
namespace {

struct State {
  std::mutex mutex;
  Faults faults;
  Counts counts;
  std::vector<std::string> violations;
  std::map<std::uintptr_t, std::uintptr_t> pinned;  // page-locked ranges: begin, end
  CUctx_st context;
};

State& state() {
  static State* const all = new State;
  return *all;
}

void violate(const std::string& what) {
  const std::lock_guard lock(state().mutex);
  state().violations.push_back(what);
}

/// What every call has to keep to.
void enter(const char* call) {
  if (in_host_function) violate(std::string(call) + " in a host function");
  if (contexts.empty()) violate(std::string(call) + " without a context");
}

/// As the next cudaGetLastError() will say.
cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

/// What is locked for an address: its page, or just itself.
std::uintptr_t lock_unit() { return state().faults.locks_bytes ? 1 : 4096; }
std::uintptr_t first_locked(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) / lock_unit() * lock_unit();
}

enum class Locked { no, whole, torn };

Locked locked(const void* address, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(state().mutex);
  const auto& pinned = state().pinned;
  auto found = pinned.upper_bound(begin);
  if (found != pinned.begin() && std::prev(found)->second > begin) {
    return std::prev(found)->second >= begin + bytes ? Locked::whole : Locked::torn;
  }
  return found != pinned.end() && found->first < begin + bytes ? Locked::torn : Locked::no;
}

cudaError_t copy(void* dst, const void* src, std::size_t bytes, cudaStream_t stream) {
  const Locked source = locked(src, bytes);
  if (source == Locked::torn) return fail(cudaErrorInvalidValue);
  {
    const std::lock_guard lock(state().mutex);
    if (source == Locked::no) ++state().counts.pageable_copies;
    if (static_cast<int>(++state().counts.copies) == state().faults.fail_copy) return cudaErrorInvalidValue;
  }
  stream->add([=] { std::memcpy(dst, src, bytes); });
  return cudaSuccess;
}

template <class To, class From>
void cast_run(void* dst, const void* src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    From in;
    std::memcpy(&in, static_cast<const std::byte*>(src) + i * sizeof(From), sizeof(From));
    To out;
    if constexpr (std::is_same_v<To, F8E4M3FN>) {
      out.bits = static_cast<std::uint8_t>(__builtin_bit_cast(std::uint32_t, to_float(in)) >> 24);
    } else {
      out = convert<To>(in);
    }
    std::memcpy(static_cast<std::byte*>(dst) + i * sizeof(To), &out, sizeof(To));
  }
}

template <class To>
void cast_to(void* dst, const void* src, Scalar src_type, std::size_t count) {
  switch (src_type) {
    case Scalar::f64:
      return cast_run<To, double>(dst, src, count);
    case Scalar::f32:
      return cast_run<To, float>(dst, src, count);
    case Scalar::f16:
      return cast_run<To, F16>(dst, src, count);
    case Scalar::bf16:
      return cast_run<To, BF16>(dst, src, count);
    case Scalar::f8_e4m3fn:
      return cast_run<To, F8E4M3FN>(dst, src, count);
    case Scalar::f8_e5m2:
      return cast_run<To, F8E5M2>(dst, src, count);
    default:
      violate("a cast of what is not floating");
  }
}

}  // namespace

void reset(std::uint64_t seed) {
  seeds = seed;
  const std::lock_guard lock(state().mutex);
  state().faults = {};
  state().violations.clear();
  Counts& counts = state().counts;
  counts = {0, 0, 0, 0, 0, 0, counts.events, counts.streams, counts.registered, counts.contexts};
}

Faults& faults() { return state().faults; }

std::vector<std::string> violations() {
  const std::lock_guard lock(state().mutex);
  return state().violations;
}

Counts counts() {
  const std::lock_guard lock(state().mutex);
  return state().counts;
}

bool is_locked(const void* address, std::size_t bytes) {
  auto at = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t end = at + bytes;
  const std::lock_guard lock(state().mutex);
  for (const auto& [first, last] : state().pinned) {
    if (first <= at && at < last) at = last;
  }
  return at >= end;
}

cudaStream_t make_stream() { return new CUstream_st; }
void destroy_stream(cudaStream_t stream) { delete stream; }
void enqueue(cudaStream_t stream, std::function<void()> work) { stream->add(std::move(work)); }
void finish(cudaStream_t stream) { stream->finish(); }
void capture(cudaStream_t stream, bool captured) { stream->captured = captured; }

void cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count) {
  switch (dst_type) {
    case Scalar::f64:
      return cast_to<double>(dst, src, src_type, count);
    case Scalar::f32:
      return cast_to<float>(dst, src, src_type, count);
    case Scalar::f16:
      return cast_to<F16>(dst, src, src_type, count);
    case Scalar::bf16:
      return cast_to<BF16>(dst, src, src_type, count);
    case Scalar::f8_e4m3fn:
      return cast_to<F8E4M3FN>(dst, src, src_type, count);
    case Scalar::f8_e5m2:
      return cast_to<F8E5M2>(dst, src, src_type, count);
    default:
      violate("a cast into what is not floating");
  }
}

}  // namespace dynswap::fake_cuda

using dynswap::fake_cuda::enter;
using dynswap::fake_cuda::state;
using dynswap::fake_cuda::violate;

namespace dynswap {

cudaError_t kernels_for_this_device() noexcept {
  enter("kernels_for_this_device");
  return state().faults.no_kernels ? cudaErrorNoKernelImageForDevice : cudaSuccess;
}

cudaError_t launch_cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count,
                        cudaStream_t stream) noexcept {
  enter("launch_cast");
  if (!device_casts_to(dst_type)) violate("a cast that the device does not know");
  {
    const std::lock_guard lock(state().mutex);
    ++state().counts.casts;
  }
  stream->add([=] { fake_cuda::cast(dst, dst_type, src, src_type, count); });
  return cudaSuccess;
}

}  // namespace dynswap

// --------------------------------------------------------------------------------------- the driver

namespace {

CUresult retain(CUcontext* context, CUdevice) {
  const std::lock_guard lock(state().mutex);
  ++state().counts.contexts;
  *context = &state().context;
  return CUDA_SUCCESS;
}
CUresult release(CUdevice) {
  const std::lock_guard lock(state().mutex);
  --state().counts.contexts;
  return CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return CUDA_SUCCESS;
}
CUresult push(CUcontext context) {
  contexts.push_back(context);
  return CUDA_SUCCESS;
}
CUresult pop(CUcontext* context) {
  if (contexts.empty()) {
    violate("cuCtxPopCurrent of nothing");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}

}  // namespace

// -------------------------------------------------------------------------------------- the runtime

extern "C" {

const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the fake runtime"; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known{
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain)},
      {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(&release)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&get_current)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(&push)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(&pop)},
  };
  const auto found = known.find(symbol);
  *function = found == known.end() ? nullptr : found->second;
  *result = found == known.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  enter("cudaDeviceGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  enter("cudaStreamCreateWithPriority");
  if (flags != cudaStreamNonBlocking || priority != -5) violate("the copy stream is not what it should be");
  const std::lock_guard lock(state().mutex);
  ++state().counts.streams;
  *stream = new CUstream_st;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  enter("cudaStreamDestroy");
  delete stream;
  const std::lock_guard lock(state().mutex);
  --state().counts.streams;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  enter("cudaStreamIsCapturing");
  const bool captured = stream != nullptr && stream->captured;
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t) {
  enter("cudaStreamQuery");
  return cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  enter("cudaStreamSynchronize");
  {
    const std::lock_guard lock(state().mutex);
    ++state().counts.synchronisations;
  }
  stream->finish();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  enter("cudaStreamWaitEvent");
  if (stream->captured) violate("a captured stream waits for what is not captured");
  std::shared_ptr<Point> point;
  {
    const std::lock_guard lock(event->mutex);
    point = event->point;
  }
  if (point) stream->add([point] { point->wait(); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  enter("cudaEventCreateWithFlags");
  const std::lock_guard lock(state().mutex);
  ++state().counts.events;
  *event = new CUevent_st;
  (*event)->timed = flags == cudaEventDefault;
  if ((*event)->timed) ++state().counts.timed_events;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  enter("cudaEventDestroy");
  delete event;
  const std::lock_guard lock(state().mutex);
  --state().counts.events;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  enter("cudaEventRecord");
  if (stream->captured) violate("an event is recorded on a captured stream");
  const auto point = std::make_shared<Point>();
  {
    const std::lock_guard lock(event->mutex);
    event->point = point;
  }
  stream->add([point, later = state().faults.later] { point->reach(later); });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  enter("cudaEventQuery");
  if (capture_mode != cudaStreamCaptureModeRelaxed) violate("a query that would spoil captures");
  if (state().faults.query_error != 0) return static_cast<cudaError_t>(state().faults.query_error);
  std::shared_ptr<Point> point;
  {
    const std::lock_guard lock(event->mutex);
    point = event->point;
  }
  if (!point) return cudaSuccess;
  const std::lock_guard lock(point->mutex);
  return point->done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  enter("cudaEventElapsedTime");
  std::chrono::steady_clock::time_point times[2];
  cudaEvent_t const events[] = {from, to};
  for (int i = 0; i < 2; ++i) {
    if (!events[i]->timed) violate("the time of an event without timing");
    const std::lock_guard lock(events[i]->mutex);
    if (!events[i]->point) return cudaErrorInvalidResourceHandle;
    const std::lock_guard point_lock(events[i]->point->mutex);
    if (!events[i]->point->done) return cudaErrorNotReady;
    times[i] = events[i]->point->at;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  enter("cudaEventSynchronize");
  if (capture_mode != cudaStreamCaptureModeRelaxed) violate("a wait that would spoil captures");
  std::shared_ptr<Point> point;
  {
    const std::lock_guard lock(event->mutex);
    point = event->point;
  }
  if (point) point->wait();
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  enter("cudaMemcpyAsync");
  if (kind != cudaMemcpyHostToDevice) violate("a copy of another kind");
  return dynswap::fake_cuda::copy(dst, src, bytes, stream);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void* const* dsts, const void* const* srcs, const size_t* sizes,
                                 size_t count, cudaMemcpyAttributes* attributes, size_t* indices,
                                 size_t attribute_count, cudaStream_t stream) {
#else
cudaError_t cudaMemcpyBatchAsync(void** dsts, void** srcs, size_t* sizes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* indices, size_t attribute_count,
                                 size_t*, cudaStream_t stream) {
#endif
  enter("cudaMemcpyBatchAsync");
  if (state().faults.no_batches) return cudaErrorNotSupported;
  if (attribute_count != 1 || indices[0] != 0 ||
      attributes->srcAccessOrder != cudaMemcpySrcAccessOrderStream) {
    return cudaErrorInvalidValue;
  }
  {
    const std::lock_guard lock(state().mutex);
    ++state().counts.batches;
  }
  for (size_t i = 0; i < count; ++i) {
    if (sizes[i] == 0) return cudaErrorInvalidValue;
    const cudaError_t error = dynswap::fake_cuda::copy(dsts[i], srcs[i], sizes[i], stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  enter("cudaLaunchHostFunc");
  {
    const std::lock_guard lock(state().mutex);
    if (static_cast<int>(++state().counts.host_functions) == state().faults.fail_host_function) {
      return cudaErrorInvalidValue;
    }
  }
  stream->add([=] {
    in_host_function = true;
    function(data);
    in_host_function = false;
  });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** block, size_t bytes, unsigned) {
  enter("cudaHostAlloc");
  if (state().faults.no_host_memory) return dynswap::fake_cuda::fail(cudaErrorMemoryAllocation);
  *block = ::operator new((bytes + 4095) / 4096 * 4096, std::align_val_t{4096});
  const std::lock_guard lock(state().mutex);
  const auto begin = reinterpret_cast<std::uintptr_t>(*block);
  state().pinned[begin] = begin + (bytes + 4095) / 4096 * 4096;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* block) {
  enter("cudaFreeHost");
  {
    const std::lock_guard lock(state().mutex);
    state().pinned.erase(reinterpret_cast<std::uintptr_t>(block));
  }
  ::operator delete(block, std::align_val_t{4096});
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  enter("cudaHostRegister");
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  const auto begin = dynswap::fake_cuda::first_locked(address);
  const std::uintptr_t unit = dynswap::fake_cuda::lock_unit();
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(address) + bytes + unit - 1) / unit * unit;
  if (dynswap::fake_cuda::locked(reinterpret_cast<void*>(begin), end - begin) !=
      dynswap::fake_cuda::Locked::no) {
    violate("a page is registered twice");
    return dynswap::fake_cuda::fail(cudaErrorHostMemoryAlreadyRegistered);
  }
  const std::lock_guard lock(state().mutex);
  if (state().counts.registered + (end - begin) > state().faults.register_at_most) {
    return dynswap::fake_cuda::fail(cudaErrorMemoryAllocation);
  }
  state().counts.registered += end - begin;
  state().pinned[begin] = end;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  enter("cudaPointerGetAttributes");
  *attributes = {};
  const bool locked = dynswap::fake_cuda::locked(address, 1) != dynswap::fake_cuda::Locked::no;
  attributes->type = locked ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  enter("cudaHostUnregister");
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  const auto begin = dynswap::fake_cuda::first_locked(address);
  const std::unique_lock lock(state().mutex);
  const auto found = state().pinned.find(begin);
  if (found == state().pinned.end()) {
    state().violations.push_back("what is not registered is unregistered");
    return cudaErrorHostMemoryNotRegistered;
  }
  state().counts.registered -= found->second - found->first;
  state().pinned.erase(found);
  return cudaSuccess;
}

}  // extern "C"
