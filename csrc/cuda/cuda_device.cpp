#include "cuda/cuda_device.h"

#include <cudaTypedefs.h>

#include <exception>
#include <string>
#include <utility>

#include "core/check.h"
#include "cuda/cuda_check.h"
#include "transfer/device_errors.h"

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

/// Returns the calling thread's mode, which `mode` takes the place of.
int exchange_capture_mode(int mode) noexcept {
  auto exchanged = static_cast<cudaStreamCaptureMode>(mode);
  DYNSWAP_CUDA_NOEXCEPT(cudaThreadExchangeStreamCaptureMode(&exchanged));
  return exchanged;
}

class CudaEvent final : public DeviceEvent {
 public:
  CudaEvent(const CudaDevice& device, bool timed) : device_(device) {
    DYNSWAP_CUDA(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming), "");
  }
  /// In the device's context: without one the runtime would make one, on the thread's device, whichever that
  /// is.
  ~CudaEvent() override {
    try {
      const OnDevice scope(device_);
      DYNSWAP_CUDA_NOEXCEPT(cudaEventDestroy(event_));
    } catch (const std::exception&) {
      // the device is lost, and its events with it
    }
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(StreamHandle stream) override {
    DYNSWAP_CUDA(cudaEventRecord(event_, cuda_stream(stream)), "stream " << stream);
  }
  void block(StreamHandle stream) const override {
    DYNSWAP_CUDA(cudaStreamWaitEvent(cuda_stream(stream), event_, 0), "stream " << stream);
  }
  void synchronise() const override { DYNSWAP_CUDA(cudaEventSynchronize(event_), ""); }
  bool passed() const override {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaSuccess) return true;
    (void)cudaGetLastError();  // "not yet" is remembered as if it were an error
    // Whatever else keeps the question from being answered says nothing about the work before the event.
    return state != cudaErrorNotReady && ends_all_work(state);
  }
  double milliseconds_since(const DeviceEvent& first) const override {
    float milliseconds = 0;
    DYNSWAP_CUDA(cudaEventElapsedTime(&milliseconds, static_cast<const CudaEvent&>(first).event_, event_),
                 "");
    return static_cast<double>(milliseconds);
  }

 private:
  const CudaDevice& device_;
  cudaEvent_t event_ = nullptr;
};

}  // namespace

CudaDevice::CudaDevice(int device, std::function<Stream(Stream)> native_handle)
    : device_(device), native_handle_(std::move(native_handle)) {
  int devices = 0;
  DYNSWAP_CUDA(cudaGetDeviceCount(&devices), "");
  watch_process();
  if (device < 0 || device >= devices) {
    throw DeviceError("there is no CUDA device " + std::to_string(device) +
                      "; devices: " + std::to_string(devices));
  }
  check_driver(driver().retain(&context_, device), "cuDevicePrimaryCtxRetain", device);
}

CudaDevice::~CudaDevice() {
  if (cuda_usable()) (void)driver().release(device_);
}

StreamDevice::Entered CudaDevice::enter() const {
  Entered entered{false, cudaStreamCaptureModeRelaxed};
  CUcontext current = nullptr;
  check_driver(driver().get_current(&current), "cuCtxGetCurrent", device_);
  if (current != context_) {
    check_driver(driver().push(context_), "cuCtxPushCurrent", device_);
    entered.pushed = true;
  }
  entered.capture_mode = exchange_capture_mode(entered.capture_mode);
  return entered;
}

void CudaDevice::leave(const Entered& entered) const noexcept {
  (void)exchange_capture_mode(entered.capture_mode);
  CUcontext popped = nullptr;
  if (entered.pushed && cuda_usable()) (void)driver().pop(&popped);
}

StreamHandle CudaDevice::make_copy_stream() const {
  int least = 0;
  int greatest = 0;
  DYNSWAP_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest), "");
  cudaStream_t stream = nullptr;
  // Non-blocking: it shall not wait for the legacy default stream, on which models run by default.
  DYNSWAP_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
               "priority " << greatest);
  return reinterpret_cast<StreamHandle>(stream);
}

void CudaDevice::destroy_copy_stream(StreamHandle stream) const noexcept {
  DYNSWAP_CUDA_NOEXCEPT(cudaStreamDestroy(cuda_stream(stream)));
}

bool CudaDevice::captured(StreamHandle stream) const noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(cuda_stream(stream), &status);
  if (error != cudaSuccess) (void)cudaGetLastError();
  if (error == cudaErrorStreamCaptureImplicit) return true;
  return error == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

void CudaDevice::synchronise(StreamHandle stream) const {
  DYNSWAP_CUDA(cudaStreamSynchronize(cuda_stream(stream)), "");
}

DeviceEventPtr CudaDevice::make_event(bool timed) const {
  return DeviceEventPtr(new CudaEvent(*this, timed));
}

}  // namespace dynswap
