// The calls of installed modules that a thread is in.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include "tensor/written_buffers.h"

namespace dynswap {

class Session;
struct Weight;

/// While it lives, its thread is inside the call of a module that this session serves, if any does. `module`
/// is that one, and lives longer.
class InsideCall {
 public:
  explicit InsideCall(const Session* session, PyObject* module = nullptr);
  ~InsideCall();
  InsideCall(const InsideCall&) = delete;
  InsideCall& operator=(const InsideCall&) = delete;

 private:
  InsideAnyCall any_;
};

/// While it lives, what its thread saves for backward leaves the device through the session. This is no call:
/// what such code reads of a model, it may write.
class InsideOffloading {
 public:
  explicit InsideOffloading(const Session& session);
  ~InsideOffloading();
  InsideOffloading(const InsideOffloading&) = delete;
  InsideOffloading& operator=(const InsideOffloading&) = delete;

 private:
  const Session& session_;
};

/// Whether this thread is inside a call of the session's modules, or of one whose place it has taken.
bool inside_call_of(const Session& session) noexcept;
/// The session whose module's call this thread entered last; null if it is in none.
const Session* innermost_session() noexcept;
/// The session of the innermost call of which saved tensors leave this device; null if they stay.
const Session* innermost_offloading_session(const at::Device& device) noexcept;
/// The session that serves the module of the innermost call; null if none does, or there is no call.
const Session* calling_session() noexcept;

/// The master of a weight, or what the weight is a part of, from a module whose call this thread is in, or
/// from one below it; null if none has it, or in another shape than `shown`.
py::object master_held_by_callers(const Weight& weight, const at::Tensor& shown);

}  // namespace dynswap
