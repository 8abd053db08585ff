// Tensor.record_stream() on what a model hands out.
#pragma once

#include <c10/core/DeviceType.h>

namespace dynswap {

/// From now on the process hears of record_stream() on devices of this type. Has to be called before the
/// first tensor is handed out on one, with the GIL.
void hear_of_record_stream(c10::DeviceType type);

}  // namespace dynswap
