// The one file that knows whether CUDA was compiled.
#include "bindings/backends.h"

#include <utility>

#include "bindings/glue.h"
#include "core/check.h"
#include "host/host_backend.h"
#ifdef DYNSWAP_WITH_CUDA
#include "cuda/cuda_backend.h"
#endif

namespace dynswap {

std::unique_ptr<Backend> make_backend(const at::Device& device, const std::string& wanted,
                                      [[maybe_unused]] const std::function<void(const std::string&)>& warn) {
  const bool host = device.is_cpu() && (wanted == "auto" || wanted == "host");
  if (host) return std::make_unique<HostBackend>(&cast_elements);
#ifdef DYNSWAP_WITH_CUDA
  if (device.is_cuda() && (wanted == "auto" || wanted == "cuda")) {
    CudaOptions options;
    options.device = device.index();
    options.cast = &cast_elements;
    options.warn = warn;
    options.allocate = [device](std::size_t bytes) {
      return CudaMemory{allocate_through_torch(device, bytes), current_stream(device)};
    };
    return make_cuda_backend(std::move(options));
  }
#endif
  throw Error("no backend '" + wanted + "' for device " + device.str() + " in this build" +
              (cuda_version().empty() ? " (it was compiled without CUDA)" : ""));
}

std::string pin_items([[maybe_unused]] const at::Device& device,
                      [[maybe_unused]] std::vector<Lockable>& items) {
#ifdef DYNSWAP_WITH_CUDA
  if (device.is_cuda()) return pin(device.index(), items);
#endif
  return {};
}

int device_count() {
#ifdef DYNSWAP_WITH_CUDA
  return cuda_device_count();
#else
  return 0;
#endif
}

std::string cuda_version() {
#ifdef DYNSWAP_WITH_CUDA
  const int version = cuda_runtime_version();
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
#else
  return "";
#endif
}

}  // namespace dynswap
