// What csrc/tensor needs of the interpreter.
#pragma once

namespace dynswap {

/// Fills in Interpreter (tensor/interpreter.h). Before the first session.
void serve_interpreter() noexcept;

}  // namespace dynswap
