#include "session/captures.h"

#include "accelerator/torch_stream.h"
#include "core/check.h"

namespace dynswap {

void refuse_capture_of_written(const c10::Device& device, const std::string& buffer) {
  if (!capturing(device)) return;
  throw DeviceError("'" + buffer +
                    "' is a buffer that its module may write while it trains, so it is looked at after each "
                    "call, which cannot be captured in a CUDA graph; call eval() on the module before the "
                    "capture, or capture without an install");
}

void refuse_capture(const c10::Device& device, const std::string& weight, bool resident) {
  if (!capturing(device)) return;
  if (resident) {
    throw DeviceError(
        "'" + weight +
        "' is not on the device yet, and cannot be brought there while a CUDA graph is captured; "
        "run the model once before the capture");
  }
  throw DeviceError(
      "'" + weight +
      "' is streamed, so other weights use its memory too, and it cannot be read while a CUDA graph "
      "is captured; capture with a budget that keeps it resident, or without an install");
}

}  // namespace dynswap
