// Tensor.record_stream() on what a model hands out.
#pragma once

namespace dynswap {

/// From now on the process hears of it. Before the first tensor is handed out on a CUDA device.
void hear_of_record_stream(c10::DeviceType type);

}  // namespace dynswap
