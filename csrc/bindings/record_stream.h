// Tensor.record_stream() on what a model hands out.
#pragma once

#include <c10/core/DeviceType.h>

namespace dynswap {

/// From now on the process hears of it. Before the first tensor is handed out on such a device.
void hear_of_record_stream(c10::DeviceType type);

}  // namespace dynswap
