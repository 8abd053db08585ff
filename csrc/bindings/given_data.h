// `.data = t` on a tensor that a forward was handed out.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "bindings/handed_out.h"

namespace dynswap {

/// Gives other data to `tensor`, which shows what was handed out with this record, and to the weight's
/// master. `assign` gives them to the tensor alone, with which the record may die. Throws, and changes
/// nothing, if no module has the master.
void give_data(HandedOut& record, const at::Tensor& tensor, const at::Tensor& data,
               const std::function<void()>& assign);

}  // namespace dynswap
