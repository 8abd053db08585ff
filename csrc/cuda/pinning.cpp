// The CUDA runtime's page-locked memory.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "cuda/cuda_device.h"
#include "transfer/page_locking.h"

namespace dynswap {

namespace {

using DevicePtr = std::shared_ptr<const CudaDevice>;

/// Clears the error, which would surface at the next, innocent call.
std::string refusal(cudaError_t error) {
  (void)cudaGetLastError();
  return std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error);
}

/// Memory that is locked while it lives.
class Registration {
 public:
  Registration(DevicePtr device, void* address) : device_(std::move(device)), address_(address) {}
  ~Registration() {
    if (!cuda_usable()) return;
    try {
      const OnDevice scope(*device_);
      DYNSWAP_CUDA_NOEXCEPT(cudaHostUnregister(address_));
    } catch (const std::exception&) {
      // the device is lost, and its registrations with it
    }
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  const DevicePtr device_;
  void* const address_;
};

class CudaPageLocker final : public PageLocker {
 public:
  explicit CudaPageLocker(int device)
      : device_(std::make_shared<const CudaDevice>(device)), scope_(*device_) {}

  bool is_locked(const std::byte* byte) override {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, byte) == cudaSuccess)
      return attributes.type == cudaMemoryTypeHost;
    (void)cudaGetLastError();
    return false;
  }

  std::shared_ptr<void> lock(std::byte* block, std::size_t bytes, std::string& reason) override {
    const cudaError_t error = cudaHostRegister(block, bytes, cudaHostRegisterPortable);
    if (error == cudaSuccess) return std::make_shared<Registration>(device_, block);
    reason = refusal(error);
    return nullptr;
  }

  std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string& reason) override {
    void* block = nullptr;
    // Portable: locked for every device of the process.
    const cudaError_t error = cudaHostAlloc(&block, bytes, cudaHostAllocPortable);
    if (error != cudaSuccess) {
      reason = refusal(error);
      return nullptr;
    }
    return {static_cast<std::byte*>(block), [device = device_](std::byte* memory) {
              if (!cuda_usable()) return;
              try {
                const OnDevice scope(*device);
                DYNSWAP_CUDA_NOEXCEPT(cudaFreeHost(memory));
              } catch (const std::exception&) {
                // the device is lost
              }
            }};
  }

 private:
  const DevicePtr device_;
  const OnDevice scope_;
};

}  // namespace

std::string pin(int device, PinnedCopies& copies, std::vector<Lockable>& items) {
  CudaPageLocker locker(device);
  return page_lock(locker, copies, items);
}

}  // namespace dynswap
