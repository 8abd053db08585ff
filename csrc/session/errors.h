// The engine's errors as Python's (dynswap_ext/errors.py).
#pragma once

namespace dynswap {

/// Sets the Python error for the C++ exception in flight. Call it in a catch block, with the GIL.
void set_python_error() noexcept;

/// Has pybind11 set the same Python errors for exceptions of whatever it calls.
void translate_errors();

}  // namespace dynswap
