#include "cuda/context.h"

#include <cudaTypedefs.h>

#include "core/check.h"
#include "cuda/cuda_check.h"

namespace dynswap {
namespace {

template <class Function>
Function entry_point(const char* symbol) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  DYNSWAP_CUDA(cudaGetDriverEntryPointByVersion(symbol, &function, 12000, cudaEnableDefault, &result),
               "symbol " << symbol);
#else
  DYNSWAP_CUDA(cudaGetDriverEntryPoint(symbol, &function, cudaEnableDefault, &result), "symbol " << symbol);
#endif
  if (result != cudaDriverEntryPointSuccess || function == nullptr) {
    throw DeviceError(std::string("the CUDA driver has no ") + symbol);
  }
  return reinterpret_cast<Function>(function);
}

/// The driver's own functions, found through the runtime: nothing links libcuda, so the extension loads
/// where there is none.
struct Driver {
  PFN_cuDevicePrimaryCtxRetain_v7000 retain;
  PFN_cuDevicePrimaryCtxRelease_v11000 release;
  PFN_cuCtxGetCurrent_v4000 get_current;
  PFN_cuCtxPushCurrent_v4000 push;
  PFN_cuCtxPopCurrent_v4000 pop;
};

const Driver& driver() {
  static const Driver functions{
      entry_point<PFN_cuDevicePrimaryCtxRetain_v7000>("cuDevicePrimaryCtxRetain"),
      entry_point<PFN_cuDevicePrimaryCtxRelease_v11000>("cuDevicePrimaryCtxRelease"),
      entry_point<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent"),
      entry_point<PFN_cuCtxPushCurrent_v4000>("cuCtxPushCurrent"),
      entry_point<PFN_cuCtxPopCurrent_v4000>("cuCtxPopCurrent"),
  };
  return functions;
}

void check_driver(CUresult result, const char* call, int device) {
  if (result == CUDA_SUCCESS) return;
  throw DeviceError(std::string("CUDA driver error ") + std::to_string(static_cast<int>(result)) + " in " +
                    call + " for device " + std::to_string(device));
}

}  // namespace

DeviceContext::DeviceContext(int device) : device_(device) {
  int devices = 0;
  DYNSWAP_CUDA(cudaGetDeviceCount(&devices), "");
  watch_process();
  if (device < 0 || device >= devices) {
    throw DeviceError("there is no CUDA device " + std::to_string(device) +
                      "; devices: " + std::to_string(devices));
  }
  check_driver(driver().retain(&context_, device), "cuDevicePrimaryCtxRetain", device);
}

DeviceContext::~DeviceContext() {
  if (cuda_usable()) (void)driver().release(device_);
}

ContextGuard::ContextGuard(const DeviceContext& context) {
  CUcontext current = nullptr;
  check_driver(driver().get_current(&current), "cuCtxGetCurrent", context.device());
  if (current != context.context_) {
    check_driver(driver().push(context.context_), "cuCtxPushCurrent", context.device());
    pushed_ = true;
  }
  DYNSWAP_CUDA_NOEXCEPT(cudaThreadExchangeStreamCaptureMode(&mode_));
}

ContextGuard::~ContextGuard() {
  DYNSWAP_CUDA_NOEXCEPT(cudaThreadExchangeStreamCaptureMode(&mode_));
  CUcontext popped = nullptr;
  if (pushed_ && cuda_usable()) (void)driver().pop(&popped);
}

bool is_captured(cudaStream_t stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error != cudaSuccess) (void)cudaGetLastError();
  // So answers the default stream while a stream is captured that it would have to wait for.
  if (error == cudaErrorStreamCaptureImplicit) return true;
  return error == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

}  // namespace dynswap
