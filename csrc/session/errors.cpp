#include "session/errors.h"

#include <torch/csrc/Exceptions.h>

#include <exception>

#include "core/check.h"

namespace dynswap {

namespace {

py::object error_class(const char* name) { return py::module_::import("dynswap_ext.errors").attr(name); }

/// Sets the Python error for the exception in flight; false if that is none of ours.
bool set_our_error() {
  try {
    throw;
  } catch (const BudgetError& error) {
    const py::object type = error_class("BudgetError");
    PyErr_SetObject(type.ptr(), type(error.what(), error.smallest_bytes()).ptr());
  } catch (const SourceError& error) {
    PyErr_SetString(error_class("SourceError").ptr(), error.what());
  } catch (const OutOfMemory& error) {
    PyErr_SetString(error_class("OutOfMemoryError").ptr(), error.what());
  } catch (const DeviceError& error) {
    PyErr_SetString(error_class("DeviceError").ptr(), error.what());
  } catch (const Error& error) {
    PyErr_SetString(error_class("DynswapError").ptr(), error.what());
  } catch (...) {
    return false;
  }
  return true;
}

}  // namespace

void set_python_error() noexcept {
  try {
    if (set_our_error()) return;
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

void translate_errors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    if (!pointer) return;
    try {
      std::rethrow_exception(pointer);
    } catch (const Error&) {
      set_our_error();
    }
  });
}

}  // namespace dynswap
