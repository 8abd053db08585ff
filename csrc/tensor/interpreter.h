// What this room needs of the interpreter in whose process it is.
#pragma once

#include <torch/csrc/autograd/function.h>

#include "accelerator/pinned_memory.h"

namespace dynswap {

/// What only an interpreter can do. csrc/python fills it in when the extension is imported. Without one (a
/// C++ test) there is no lock, and no object that a node could keep.
struct Interpreter {
  using NodePointer = decltype(torch::autograd::Edge::function);

  void* (*release_lock)() = nullptr;          ///< the GIL, which the calling thread has
  void (*take_lock)(void* thread) = nullptr;  ///< again; `thread` is what release_lock() returned
  /// Makes the node's Python object, and lets go of it (Note [Nodes that are read outside a forward]).
  void (*make_object)(const NodePointer& node) = nullptr;
  /// How memory is page-locked in place through what torch shows to Python; see python/host_register.h.
  HostRegister (*host_register)(const c10::Device& device) = nullptr;

  static Interpreter& get() noexcept {
    static Interpreter interpreter;
    return interpreter;
  }
};

/// While it lives, the calling thread, which has the GIL, does without it.
class WithoutGil {
 public:
  WithoutGil() : thread_(Interpreter::get().release_lock ? Interpreter::get().release_lock() : nullptr) {}
  ~WithoutGil() {
    if (thread_ != nullptr) Interpreter::get().take_lock(thread_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* const thread_;
};

}  // namespace dynswap
