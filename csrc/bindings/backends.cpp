// The one file that knows whether CUDA was compiled.
#include "bindings/backends.h"

#include "bindings/glue.h"
#include "core/check.h"
#include "host/host_backend.h"
#ifdef DYNSWAP_WITH_CUDA
#include "cuda/cuda_backend.h"
#endif

namespace dynswap {

std::unique_ptr<Backend> make_backend(const at::Device& device, const std::string& wanted) {
  const bool host = device.is_cpu() && (wanted == "auto" || wanted == "host");
  if (host) return std::make_unique<HostBackend>(&cast_elements);
#ifdef DYNSWAP_WITH_CUDA
  if (device.is_cuda() && (wanted == "auto" || wanted == "cuda")) {
    CudaOptions options;
    options.device = device.index();
    options.cast = &cast_elements;
    options.allocate = [device](std::size_t bytes) { return allocate_through_torch(device, bytes); };
    return make_cuda_backend(std::move(options));
  }
#endif
  throw Error("no backend '" + wanted + "' for device " + device.str() + " in this build" +
              (compiled_with_cuda() ? "" : " (it was compiled without CUDA)"));
}

std::shared_ptr<void> pin_sources(const at::Device& device, std::vector<SourcePtr>& sources) {
#ifdef DYNSWAP_WITH_CUDA
  if (device.is_cuda()) return pin(device.index(), sources);
#endif
  static_cast<void>(device);
  static_cast<void>(sources);
  return nullptr;
}

bool compiled_with_cuda() noexcept {
#ifdef DYNSWAP_WITH_CUDA
  return true;
#else
  return false;
#endif
}

int cuda_devices() noexcept {
#ifdef DYNSWAP_WITH_CUDA
  return cuda_device_count();
#else
  return 0;
#endif
}

}  // namespace dynswap
