// The backend over any accelerator that torch knows: through torch's own streams, events and copies, without
// the maker's toolkit.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "core/backend.h"
#include "transfer/staging.h"

namespace dynswap {

struct TorchBackendOptions {
  c10::Device device{c10::kCUDA, 0};

  /// Returns device memory from torch's allocator, without synchronising, and the stream that is current.
  /// Throws OutOfMemory. Never called under a lock.
  std::function<std::pair<Memory, c10::Stream>(std::size_t bytes)> allocate;

  /// Casts elements on the host, for weights that are cast there (Note [Where a weight is cast]).
  CastFn cast = nullptr;

  /// The ring of pinned buffers between sources that are not pinned and the device. It exists from the
  /// first such source on.
  std::size_t staging_bytes = kStagingBytes;
  unsigned staging_buffers = kStagingBuffers;
  unsigned readers = 4;  ///< threads that fill them
};

/// A Stream of this backend is a c10::StreamId. Throws DeviceError if the device cannot be served.
std::unique_ptr<Backend> make_torch_backend(TorchBackendOptions options);

}  // namespace dynswap
