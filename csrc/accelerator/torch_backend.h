// The backend over any accelerator that torch knows: through torch's own streams, events and copies, without
// the maker's toolkit.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "core/backend.h"
#include "transfer/transfer_stream.h"

namespace dynswap {

/// A Stream of this backend is a c10::StreamId. Throws DeviceError if the device cannot be served.
std::unique_ptr<Backend> make_torch_backend(const c10::Device& device, StreamOptions options);

}  // namespace dynswap
