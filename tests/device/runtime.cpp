// The CUDA runtime's face of the pretend machine: what csrc/cuda links instead of libcudart. Some of it is in
// runtime_of_torch.cpp.
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "kernels.h"
#include "machine.h"
#include "runtime_calls.h"

struct CUevent_st {
  pretend::PointPtr point;  // of the last record
  bool timed = false;
};

struct CUctx_st {
  int device;
};

namespace {

CUctx_st primary[pretend::kDevices]{{0}, {1}};

pretend::Stream& stream_of(cudaStream_t stream) {
  if (stream == nullptr) return pretend::default_stream(pretend::current_device());
  return *reinterpret_cast<pretend::Stream*>(stream);
}

cudaError_t fail(int error) { return static_cast<cudaError_t>(pretend::fail(error)); }

template <class Body>
cudaError_t call(const char* name, Body body) {
  return static_cast<cudaError_t>(pretend::call(name, body));
}

template <class Body>
cudaError_t unsafe_call(const char* name, Body body) {
  return static_cast<cudaError_t>(pretend::unsafe_call(name, body));
}

// --------------------------------------------------------------------------------------- the driver

CUresult retain(CUcontext* context, CUdevice device) {
  pretend::count(&pretend::Counts::contexts);
  *context = &primary[device];
  return CUDA_SUCCESS;
}
CUresult release(CUdevice) {
  pretend::count(&pretend::Counts::contexts, -1);
  return CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) {
  *context = pretend::contexts().empty() ? nullptr : &primary[pretend::contexts().back()];
  return CUDA_SUCCESS;
}
CUresult push(CUcontext context) {
  pretend::contexts().push_back(context->device);
  return CUDA_SUCCESS;
}
CUresult pop(CUcontext* context) {
  if (pretend::contexts().empty()) {
    pretend::violate("cuCtxPopCurrent of nothing");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  *context = &primary[pretend::contexts().back()];
  pretend::contexts().pop_back();
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorAssert:
      return "cudaErrorAssert";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorNoKernelImageForDevice:
      return "cudaErrorNoKernelImageForDevice";
    case cudaErrorUnsupportedPtxVersion:
      return "cudaErrorUnsupportedPtxVersion";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorSystemNotReady:
      return "cudaErrorSystemNotReady";
    case cudaErrorUnknown:
      return "cudaErrorUnknown";
    default:
      return "cudaErrorOther";
  }
}
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  static thread_local std::string text;
  text = "error " + std::to_string(error) + " of the pretend runtime; " + pretend::sticky_error();
  return text.c_str();
}

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  if (pretend::faults().no_devices) {
    *count = 0;
    return fail(cudaErrorNoDevice);
  }
  if (pretend::faults().device_count_error != 0) return fail(pretend::faults().device_count_error);
  *count = pretend::kDevices;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = pretend::current_device();
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = pretend::faults().driver_version;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
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

// -------------------------------------------------------------------------------------------- streams

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return call("cudaStreamCreateWithPriority", [&] {
    if (flags != cudaStreamNonBlocking) pretend::violate("a stream that waits for the default stream");
    *stream = reinterpret_cast<cudaStream_t>(&pretend::make_stream(pretend::current_device(), priority));
    return cudaSuccess;
  });
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call("cudaStreamDestroy", [&] {
    pretend::destroy(stream_of(stream));
    return cudaSuccess;
  });
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = pretend::priority_of(stream_of(stream));
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return unsafe_call("cudaStreamQuery", [&] {
    return pretend::idle(stream_of(stream)) ? cudaSuccess : fail(cudaErrorNotReady);
  });
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return unsafe_call("cudaStreamSynchronize", [&] {
    pretend::synchronise(stream_of(stream), "cudaStreamSynchronize");
    return cudaSuccess;
  });
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  if (pretend::capture_forbids_all("cudaDeviceSynchronize")) return fail(cudaErrorStreamCaptureUnsupported);
  return call("cudaDeviceSynchronize", [&] {
    pretend::synchronise_device(pretend::current_device(), "cudaDeviceSynchronize");
    return cudaSuccess;
  });
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return call("cudaStreamWaitEvent", [&] {
    pretend::wait(stream_of(stream), event->point);
    return cudaSuccess;
  });
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status =
      pretend::capturing(stream_of(stream)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// --------------------------------------------------------------------------------------------- events

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call("cudaEventCreateWithFlags", [&] {
    pretend::count(&pretend::Counts::events);
    *event = new CUevent_st;
    (*event)->timed = (flags & cudaEventDisableTiming) == 0;
    if ((*event)->timed) pretend::count(&pretend::Counts::timed_events);
    return cudaSuccess;
  });
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  // (Of a device that has failed too, unlike any other call.)
  if (pretend::on_device_thread()) pretend::violate("cudaEventDestroy in a host function");
  // The runtime would make a context, on the thread's device, whichever that is.
  if (pretend::contexts().empty()) pretend::violate("cudaEventDestroy without a context");
  pretend::count(&pretend::Counts::events, -1);
  delete event;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("cudaEventRecord", [&] {
    event->point = pretend::record(stream_of(stream));
    return cudaSuccess;
  });
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  return unsafe_call("cudaEventQuery", [&] {
    if (pretend::faults().query_error != 0) return fail(pretend::faults().query_error);
    return pretend::reached(event->point) ? cudaSuccess : fail(cudaErrorNotReady);
  });
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return unsafe_call("cudaEventSynchronize", [&] {
    pretend::synchronise(event->point, "cudaEventSynchronize");
    return cudaSuccess;
  });
}

EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return call("cudaEventElapsedTime", [&] {
    if (!from->timed || !to->timed || !from->point || !to->point) return fail(cudaErrorInvalidResourceHandle);
    if (!pretend::reached(from->point) || !pretend::reached(to->point)) return fail(cudaErrorNotReady);
    const auto time = pretend::time_of(to->point) - pretend::time_of(from->point);
    *milliseconds = std::chrono::duration<float, std::milli>(time).count();
    return cudaSuccess;
  });
}

// --------------------------------------------------------------------------------------------- copies

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  return call("cudaMemcpyAsync", [&] {
    const bool from_host = pretend::device_of(from) < 0, to_host = pretend::device_of(to) < 0;
    const cudaMemcpyKind is = from_host ? (to_host ? cudaMemcpyHostToHost : cudaMemcpyHostToDevice)
                                        : (to_host ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice);
    if (kind != is && kind != cudaMemcpyDefault) return fail(cudaErrorInvalidMemcpyDirection);
    pretend::copy(stream_of(stream), to, from, bytes);
    return cudaSuccess;
  });
}

#if CUDART_VERSION >= 13000
EXPORT cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* sizes,
                                        size_t count, cudaMemcpyAttributes* attributes, size_t* indices,
                                        size_t attribute_count, cudaStream_t stream) {
#else
EXPORT cudaError_t cudaMemcpyBatchAsync(void** to, void** from, size_t* sizes, size_t count,
                                        cudaMemcpyAttributes* attributes, size_t* indices,
                                        size_t attribute_count, size_t*, cudaStream_t stream) {
#endif
  return call("cudaMemcpyBatchAsync", [&] {
    if (pretend::faults().no_batches) return fail(cudaErrorCallRequiresNewerDriver);
    // The legacy default stream is not served; order of access has to be told.
    if (stream == nullptr || attribute_count != 1 || indices[0] != 0 ||
        attributes->srcAccessOrder != cudaMemcpySrcAccessOrderStream) {
      return fail(cudaErrorInvalidValue);
    }
    pretend::count(&pretend::Counts::batches);
    if (std::find(sizes, sizes + count, size_t{0}) != sizes + count) return fail(cudaErrorInvalidValue);
    for (const size_t i : pretend::any_order(count)) {
      pretend::copy(stream_of(stream), to[i], from[i], sizes[i]);
    }
    return cudaSuccess;
  });
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return call("cudaLaunchHostFunc", [&] {
    pretend::enqueue_host_function(stream_of(stream), [=] { function(data); });
    return cudaSuccess;
  });
}

// --------------------------------------------------------------------------------------- host memory

EXPORT cudaError_t cudaHostAlloc(void** block, size_t bytes, unsigned) {
  return unsafe_call("cudaHostAlloc", [&] {
    *block = pretend::allocate_pinned(bytes);
    return *block == nullptr ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
  });
}

EXPORT cudaError_t cudaFreeHost(void* block) {
  return unsafe_call("cudaFreeHost", [&] {
    pretend::wait_before_unpinning("cudaFreeHost");
    pretend::free_pinned(block);
    return cudaSuccess;
  });
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  return call("cudaPointerGetAttributes", [&] {
    *attributes = {};
    const int device = pretend::device_of(address);
    attributes->device = device < 0 ? pretend::current_device() : device;
    attributes->type = device >= 0                                             ? cudaMemoryTypeDevice
                       : pretend::pinned(address, 1) == pretend::Pinned::whole ? cudaMemoryTypeHost
                                                                               : cudaMemoryTypeUnregistered;
    if (attributes->type == cudaMemoryTypeHost) attributes->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
  });
}

// -------------------------------------------------------------------------------------------- kernels

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}

EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                                   dim3*, dim3*, int*) {
  pretend::register_kernel(host, name);
}

namespace {
struct Configuration {
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
};
thread_local Configuration configuration;
}  // namespace

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t,
                                    cudaStream_t stream) {
  return call("a kernel", [&] {
    if (pretend::faults().kernel_error != 0) return fail(pretend::faults().kernel_error);
    pretend::Work work = pretend::kernel(host, arguments, std::size_t{grid.x} * block.x);
    if (!work) return fail(cudaErrorInvalidDeviceFunction);
    pretend::count(&pretend::Counts::kernels);
    pretend::enqueue(stream_of(stream), std::move(work), "a kernel");
    return cudaSuccess;
  });
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return pretend::faults().kernel_error != 0 ? fail(pretend::faults().kernel_error) : cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                      size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

}  // extern "C"
