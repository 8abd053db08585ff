// What torch's builds for CUDA bring of the CUDA runtime, as far as somebody asks for it without the
// toolkit's headers: torch.cuda.cudart() (torch_cuda_module.cpp), and csrc/accelerator, which looks for it by
// name.
#include <utility>

#include "runtime_calls.h"

namespace pretend {

int& last_runtime_error() noexcept {
  thread_local int error = 0;
  return error;
}

}  // namespace pretend

extern "C" {

EXPORT int cudaGetLastError() {
  if (!pretend::sticky_error().empty()) return pretend::kAssertFailed;
  return std::exchange(pretend::last_runtime_error(), 0);
}
EXPORT int cudaPeekAtLastError() { return pretend::last_runtime_error(); }

EXPORT int cudaThreadExchangeStreamCaptureMode(int* mode) {
  constexpr int kGlobal = 0, kRelaxed = 2;
  const bool before = std::exchange(pretend::relaxed(), *mode == kRelaxed);
  *mode = before ? kRelaxed : kGlobal;
  return 0;
}

/// The driver's own: of host memory, what its registration or allocation is.
EXPORT int cuPointerGetAttribute(void* value, int attribute, std::uintptr_t address) {
  constexpr int kRangeStart = 11, kRangeSize = 12, kInvalidValue = 1, kUnsupported = 801;
  const auto [begin, bytes] = pretend::pinned_range(reinterpret_cast<const void*>(address));
  if (bytes == 0) return kInvalidValue;
  if (attribute != kRangeStart && attribute != kRangeSize) return kUnsupported;
  *static_cast<std::uintptr_t*>(value) = attribute == kRangeStart ? begin : bytes;
  return 0;
}

EXPORT int cudaHostRegister(void* address, std::size_t bytes, unsigned) {
  return pretend::unsafe_call("cudaHostRegister", [&] {
    const int error = pretend::pin(address, bytes);
    return error == 0 ? 0 : pretend::fail(error);
  });
}

EXPORT int cudaHostUnregister(void* address) {
  return pretend::unsafe_call("cudaHostUnregister", [&] {
    pretend::wait_before_unpinning("cudaHostUnregister");
    const int error = pretend::unpin(address);
    return error == 0 ? 0 : pretend::fail(error);
  });
}

}  // extern "C"
