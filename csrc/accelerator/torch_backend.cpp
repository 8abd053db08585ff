#include "accelerator/torch_backend.h"

#include <utility>

#include "accelerator/copy_issuer.h"
#include "accelerator/device_runtime.h"
#include "accelerator/torch_device.h"
#include "transfer/stream_backend.h"

namespace dynswap {

std::unique_ptr<Backend> make_torch_backend(const c10::Device& device, StreamOptions options) {
  const auto on = std::make_shared<const TorchDevice>(device);
  const auto stream = std::make_shared<TransferStream>(on, std::move(options));
  watch_process();
  auto issuer = std::make_unique<TorchCopyIssuer>(device, stream);
  return std::make_unique<StreamBackend>("torch", stream, std::move(issuer));
}

}  // namespace dynswap
