#include "accelerator/device_runtime.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <initializer_list>
#include <string>

#include "platform/process.h"
#include "transfer/usable_devices.h"

namespace dynswap {
namespace {

constexpr int kCaptureImplicit = 906;  // cudaErrorStreamCaptureImplicit, hipErrorStreamCaptureImplicit

/// A function of the CUDA runtime that torch has loaded, or AMD's of the same name; null if there is none.
template <class Function>
Function find(const std::string& name) noexcept {
  for (const char* runtime : {"cuda", "hip"}) {
    if (void* const symbol = loaded_function((runtime + name).c_str()))
      return reinterpret_cast<Function>(symbol);
  }
  return nullptr;
}

/// Whether the stream is captured, asked of the runtime: before torch 2.13 torch's guard cannot be.
bool runtime_captures(const c10::Stream& stream) {
  static const auto ask = find<int (*)(void* stream, int* status)>("StreamIsCapturing");
  if (ask == nullptr || !stream.device().is_cuda() || !devices_usable()) return false;
  int status = 0;
  const int error = ask(stream.native_handle(), &status);
  if (error != 0) forget_last_error();
  return error == kCaptureImplicit || (error == 0 && status != 0);
}

template <class Guard>
bool captures(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) return guard.isStreamCapturing(stream);
  return runtime_captures(stream);
}

}  // namespace

bool is_captured(const c10::Stream& stream) {
  return captures(c10::impl::VirtualGuardImpl(stream.device_type()), stream);
}

int exchange_capture_mode(int mode) noexcept {
  static const auto exchange = find<int (*)(int* mode)>("ThreadExchangeStreamCaptureMode");
  if (exchange != nullptr && devices_usable()) (void)exchange(&mode);
  return mode;
}

void forget_last_error() noexcept {
  static const auto get_last_error = find<int (*)()>("GetLastError");
  if (get_last_error != nullptr && devices_usable()) (void)get_last_error();
}

}  // namespace dynswap
