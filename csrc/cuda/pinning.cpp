// The CUDA runtime's page-locked memory.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/context.h"
#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"
#include "transfer/page_locking.h"

namespace dynswap {

namespace {

using ContextPtr = std::shared_ptr<const DeviceContext>;

/// Clears the error, which would surface at the next, innocent call.
std::string refusal(cudaError_t error) {
  (void)cudaGetLastError();
  return std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error);
}

/// Memory that is locked while it lives.
class Registration {
 public:
  Registration(ContextPtr context, void* address) : context_(std::move(context)), address_(address) {}
  ~Registration() {
    if (!cuda_usable()) return;
    try {
      const ContextGuard guard(*context_);
      DYNSWAP_CUDA_NOEXCEPT(cudaHostUnregister(address_));
    } catch (const std::exception&) {
      // the device is lost, and its registrations with it
    }
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  const ContextPtr context_;
  void* const address_;
};

class CudaPageLocker final : public PageLocker {
 public:
  explicit CudaPageLocker(int device)
      : context_(std::make_shared<const DeviceContext>(device)), guard_(*context_) {}

  bool is_locked(const std::byte* byte) override {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, byte) == cudaSuccess)
      return attributes.type == cudaMemoryTypeHost;
    (void)cudaGetLastError();
    return false;
  }

  std::shared_ptr<void> lock(std::byte* block, std::size_t bytes, std::string& reason) override {
    const cudaError_t error = cudaHostRegister(block, bytes, cudaHostRegisterPortable);
    if (error == cudaSuccess) return std::make_shared<Registration>(context_, block);
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
    return {static_cast<std::byte*>(block), [context = context_](std::byte* memory) {
              if (!cuda_usable()) return;
              try {
                const ContextGuard guard(*context);
                DYNSWAP_CUDA_NOEXCEPT(cudaFreeHost(memory));
              } catch (const std::exception&) {
                // the device is lost
              }
            }};
  }

 private:
  const ContextPtr context_;
  const ContextGuard guard_;
};

}  // namespace

std::string pin(int device, const std::shared_ptr<PinnedBudget>& budget, std::vector<Lockable>& items) {
  CudaPageLocker locker(device);
  return page_lock(locker, budget, items);
}

}  // namespace dynswap
