#include "accelerator/device_runtime.h"

#include <initializer_list>
#include <string>

#include "platform/process.h"
#include "transfer/process.h"

namespace dynswap {
namespace {

constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed, hipStreamCaptureModeRelaxed

/// A function of the CUDA runtime that torch has loaded, or AMD's of the same name; null if there is none.
template <class Function>
Function find(const std::string& name) noexcept {
  for (const char* runtime : {"cuda", "hip"}) {
    if (void* const symbol = loaded_function((runtime + name).c_str()))
      return reinterpret_cast<Function>(symbol);
  }
  return nullptr;
}

int (*exchange() noexcept)(int*) {
  static const auto found = find<int (*)(int* mode)>("ThreadExchangeStreamCaptureMode");
  return found;
}

}  // namespace

RelaxedCapture::RelaxedCapture() noexcept : mode_(kRelaxed) {
  if (exchange() != nullptr && devices_usable()) (void)exchange()(&mode_);
}

RelaxedCapture::~RelaxedCapture() {
  if (exchange() != nullptr && devices_usable()) (void)exchange()(&mode_);
}

void forget_last_error() noexcept {
  static const auto get_last_error = find<int (*)()>("GetLastError");
  if (get_last_error != nullptr && devices_usable()) (void)get_last_error();
}

}  // namespace dynswap
