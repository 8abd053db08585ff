// What torch's meta kernels have answered: the shapes of an operator's results.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>

namespace pretend {

/// Note [A meta kernel is asked once]
///   Many of torch's meta kernels are Python, and take a hundred times as long as all else that an operator
///   of a small model does here. Their answer depends on what a call looks like alone: the operator, the
///   shapes, strides and dtypes of its tensors, its other arguments, and the default dtype. So it is kept.
///
/// Returns all that as a text; empty if there is more to it. `host_values`: the values of tensors on the host
/// have a part in it, too.
std::string look_of_call(const c10::FunctionSchema& schema, const c10::IValue* arguments, bool host_values);

/// The answer to a call of that look; nothing if it has not been kept.
std::optional<torch::jit::Stack> known_meta(const std::string& look);
void keep_meta(const std::string& look, const torch::jit::Stack& answer);

}  // namespace pretend
