#include "accelerator/relaxed_capture.h"

#include <dlfcn.h>

#include <initializer_list>

#include "transfer/process.h"

namespace dynswap {
namespace {

constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed, hipStreamCaptureModeRelaxed

/// cudaThreadExchangeStreamCaptureMode(), or AMD's, of the runtime that torch has loaded; null if there is
/// none. torch has no call of its own for it.
using Exchange = int (*)(int* mode);
Exchange exchange() noexcept {
  static const Exchange found = [] {
    for (const char* name : {"cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"}) {
      if (void* const symbol = dlsym(RTLD_DEFAULT, name)) return reinterpret_cast<Exchange>(symbol);
    }
    return Exchange{nullptr};
  }();
  return found;
}

}  // namespace

RelaxedCapture::RelaxedCapture() noexcept : mode_(kRelaxed) {
  if (exchange() != nullptr && devices_usable()) (void)exchange()(&mode_);
}

RelaxedCapture::~RelaxedCapture() {
  if (exchange() != nullptr && devices_usable()) (void)exchange()(&mode_);
}

}  // namespace dynswap
