#include "cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include "core/check.h"
#include "cuda/copy_issuer.h"
#include "cuda/cuda_check.h"
#include "cuda/cuda_device.h"
#include "transfer/stream_backend.h"

namespace dynswap {

std::unique_ptr<Backend> make_cuda_backend(CudaOptions options) {
  const auto device = std::make_shared<const CudaDevice>(options.device, options.native_handle);
  const auto stream = std::make_shared<TransferStream>(device, options);
  const OnDevice scope(*device);
  auto issuer = std::make_unique<CudaCopyIssuer>(options.device, std::move(options.warn), stream);
  return std::make_unique<StreamBackend>("cuda", stream, std::move(issuer));
}

int cuda_device_count() {
  if (!cuda_usable())
    throw DeviceError("CUDA cannot be used in a process that was forked from one that had used it");
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  watch_process();
  if (error == cudaErrorNoDevice) {
    (void)cudaGetLastError();
    return 0;
  }
  if (error != cudaSuccess) throw_cuda_error(error, "cudaGetDeviceCount", "");
  return devices;
}

namespace {

constexpr LinkedCuda kLinked{&make_cuda_backend, &pin, &cuda_device_count, CUDART_VERSION};
[[maybe_unused]] const bool is_linked = [] {
  linked_cuda = &kLinked;
  return true;
}();

}  // namespace

}  // namespace dynswap
