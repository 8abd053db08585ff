// One managed parameter or buffer; tied masters are one weight.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "bindings/master.h"
#include "core/engine.h"

namespace dynswap {

/// LOCK: the GIL guards every field.
struct Weight {
  /// How an access is served.
  enum class Way : std::uint8_t {
    as_is,      ///< the master is where and what is asked for already
    streamed,   ///< by the engine
    converted,  ///< by torch's own `.to()` at each access: what the engine cannot move (subclasses, sparse,
                ///< overlapping), and what was registered after the engine had made its plan
  };

  std::string name;
  bool parameter = true;
  Way way = Way::converted;
  bool planned = false;  ///< the engine knows it as `id`
  WeightId id = 0;
  at::ScalarType wanted = at::kFloat;
  MasterState state;  ///< the master whose bytes the engine has
  SourcePtr source;
  SilentWrites silent;

  /// A resident's tensor, kept for good. Owned.
  PyObject* cached = nullptr;
  c10::StreamId cached_stream = 0;  ///< the stream that is known to wait for its copy
  /// The latest tensor handed out, if somebody still has it: one access gives what the other gave.
  c10::weak_intrusive_ptr<c10::TensorImpl> latest{c10::intrusive_ptr<c10::TensorImpl>()};
  std::uint64_t forgotten = 0;  ///< how often what had been handed out was given up as outdated

  void forget() {
    ++forgotten;
    latest.reset();
    Py_CLEAR(cached);
  }
};

}  // namespace dynswap
