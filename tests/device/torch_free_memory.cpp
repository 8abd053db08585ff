#include "torch_free_memory.h"

#include <c10/core/DeviceType.h>
#include <c10/util/Registry.h>

namespace c10 {

/// As in c10/cuda/CUDACachingAllocator.h, which needs the toolkit's headers.
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};

C10_DECLARE_REGISTRY(FreeCudaMemoryCallbacksRegistry, FreeMemoryCallback);
C10_DEFINE_REGISTRY(FreeCudaMemoryCallbacksRegistry, FreeMemoryCallback)

}  // namespace c10

namespace pretend {

bool run_free_memory_callbacks() {
  if (c10::DeviceType::PRETEND_TYPE != c10::DeviceType::CUDA) return false;
  bool freed = false;
  for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys())
    freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
  return freed;
}

}  // namespace pretend
