// The one file that knows whether the extension was linked with CUDA.
#include "accelerator/backends.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "accelerator/giving_way.h"
#include "accelerator/plain_torch.h"
#include "accelerator/scalars.h"
#include "accelerator/torch_backend.h"
#include "accelerator/torch_stream.h"
#include "core/amount.h"
#include "core/check.h"
#include "cuda/cuda_backend.h"
#include "host/host_backend.h"

namespace dynswap {
namespace {

/// Device memory through torch's allocator, so that its statistics and its handling of an exhausted
/// device stay true. Throws OutOfMemory.
Memory allocate_through_torch(const at::Device& device, std::size_t bytes) {
  const PlainTorch guard;  // memory of our own: no transform, mode or graph of the user's has a part in it
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  while (true) try {
      auto block = std::make_shared<at::Tensor>(at::empty({static_cast<std::int64_t>(bytes)}, options));
      auto* data = static_cast<std::byte*>(block->data_ptr());
      return Memory(std::move(block), data);
    } catch (const c10::OutOfMemoryError& error) {
      if (give_way(device)) continue;
      throw OutOfMemory("no room for " + amount(bytes) + " of weights on " + device.str() +
                        "; pass a smaller budget. " + error.what_without_backtrace());
    }
}

StreamOptions stream_options(const at::Device& device) {
  StreamOptions options;
  options.cast = &cast_elements;
  options.allocate = [device](std::size_t bytes) {
    return StreamMemory{allocate_through_torch(device, bytes), current_stream(device)};
  };
  return options;
}

}  // namespace

std::unique_ptr<Backend> make_backend(const at::Device& device, const std::string& wanted,
                                      const std::function<void(const std::string&)>& warn) {
  const bool host = device.is_cpu() && (wanted == "auto" || wanted == "host");
  if (host) return std::make_unique<HostBackend>(&cast_elements);
  if (linked_cuda != nullptr && device.is_cuda() && (wanted == "auto" || wanted == "cuda")) {
    const auto handle = [device](Stream stream) { return native_handle(device, stream); };
    CudaOptions options{stream_options(device), device.index(), handle, warn};
    return linked_cuda->make_backend(std::move(options));
  }
  if (!device.is_cpu() && (wanted == "auto" || wanted == "torch"))
    return make_torch_backend(device, stream_options(device));
  throw Error("no backend '" + wanted + "' for device " + device.str() + " in this build" +
              (cuda_version().empty() ? " (it was compiled without CUDA)" : ""));
}

std::string pin_items(const at::Device& device, const std::string& backend, const HostRegister& host_register,
                      PinnedCopies& copies, std::vector<Lockable>& items) {
  if (linked_cuda != nullptr && backend == "cuda")
    return linked_cuda->pin_masters(device.index(), copies, items);
  if (backend == "torch") return pin_through_torch(device, host_register, copies, items);
  return {};
}

int device_count() { return linked_cuda == nullptr ? 0 : linked_cuda->device_count(); }

std::string cuda_version() {
  if (linked_cuda == nullptr) return "";
  const int version = linked_cuda->runtime_version;
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace dynswap
