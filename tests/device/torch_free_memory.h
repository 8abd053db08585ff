// The callbacks that torch's CUDA allocator runs before it asks the driver for memory.
#pragma once

namespace pretend {

/// True if one of them says that it has freed some. Devices of other types have none.
bool run_free_memory_callbacks();

}  // namespace pretend
