// Page-locking in place without a toolkit: through the runtime that torch shows to Python.
#pragma once

#include <c10/core/Device.h>

#include "accelerator/pinned_memory.h"

namespace dynswap {

/// Null where torch offers no runtime. This and what it returns may be called with or without the GIL.
HostRegister host_register_for(const c10::Device& device);

}  // namespace dynswap
