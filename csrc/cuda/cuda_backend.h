// The backend over an NVIDIA GPU: what the bindings see of it. No CUDA header is needed to include this.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"

namespace dynswap {

/// Device memory, and the stream in whose order its allocator handed it out.
struct CudaMemory {
  Memory memory;
  Stream stream = 0;
};

struct CudaOptions {
  int device = 0;

  /// Device memory aligned to 512 bytes, without synchronising: torch's caching allocator, say, and the
  /// stream that was current when it was asked. Throws OutOfMemory. Never called under a lock.
  std::function<CudaMemory(std::size_t bytes)> allocate;

  /// Casts on the host, what is cast there (Note [Where a weight is cast] in cuda_backend.cpp).
  CastFn cast = nullptr;

  /// The ring of pinned buffers between sources that are not pinned and the device. It exists from the
  /// first such source on.
  std::size_t staging_bytes = 8u << 20;  ///< of one buffer
  unsigned staging_buffers = 8;
  unsigned readers = 4;  ///< threads that fill them
};

/// Throws DeviceError if there is no such device, or its driver is too old.
std::unique_ptr<Backend> make_cuda_backend(CudaOptions options);

/// Page-locks the sources that lie in plain RAM, and replaces those it has locked by ones that say so.
/// Returns what keeps them locked, and their bytes alive: let it go only after the copies that read them.
/// `refused` is called, once, with the reason if the system refuses some; they stay as they are.
/// Throws DeviceError only if there is no such device.
///
/// Locking is in place and exact: the pages that the sources lie on, no copy, no rounding up.
std::shared_ptr<void> pin(int device, std::vector<SourcePtr>& sources,
                          const std::function<void(const std::string&)>& refused = {});

/// 0 where there is no device, no driver, or one too old for the runtime that is linked. Wakes the driver:
/// a process forked afterwards cannot use CUDA.
int cuda_device_count() noexcept;

/// Version of the runtime that is linked, as CUDA counts: 13000 is 13.0.
int cuda_runtime_version() noexcept;

}  // namespace dynswap
