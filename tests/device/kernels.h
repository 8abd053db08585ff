// The kernels of csrc/cuda, as functions that the device's thread runs.
#pragma once

#include "machine.h"

namespace pretend {

/// As the compiler's own start-up code tells: a kernel's handle, and its mangled name.
void register_kernel(const void* handle, const char* name);

/// The work of a launch of that many threads with these arguments, which are copied; null if the kernel is
/// not known.
Work kernel(const void* handle, void** arguments, std::size_t threads);

}  // namespace pretend
