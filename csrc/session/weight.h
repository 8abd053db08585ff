// One managed parameter or buffer; tied masters are one weight.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/giving_way.h"
#include "core/engine.h"
#include "session/cpython.h"
#include "session/options.h"
#include "tensor/gradient_nodes.h"
#include "tensor/master_record.h"

namespace dynswap {

/// Note [Release after the change]
/// Releasing a tensor or pinned memory can run any code: torch lets go of the GIL where a tensor dies, and
/// weak references have callbacks. Code that ran halfway through a change would get the old copy, and keep it
/// as the new one. So a change only collects here what it releases. That is dropped once the session and the
/// engine both know the change, outside loops over weights, and before the engine is asked for another copy,
/// which needs the room. After that the weight may have changed again: Session::settle() looks once more.
struct DeferredRelease {
  DeferredRelease() = default;
  DeferredRelease(const DeferredRelease&) = delete;
  DeferredRelease& operator=(const DeferredRelease&) = delete;
  ~DeferredRelease() { drop(); }

  bool empty() const noexcept { return tensors.empty() && nodes.empty() && earlier.empty() && !pinned; }
  void drop() {
    tensors.clear();
    nodes.clear();
    earlier.clear();
    if (!pinned) return;
    const py::gil_scoped_release release;  // its memory may have to be unlocked, and is freed
    pinned.reset();
  }

  std::vector<py::object> tensors;
  std::vector<SharedNodeOwner::Pointer> nodes;
  std::vector<std::shared_ptr<const void>> earlier;  ///< of WeightTable::replace_master()
  SourcePtr pinned;
};

struct Weight;

/// An engine with its plan, and the weights that its ids refer to. Each weight keeps the plan to which its id
/// belongs, so an access goes to the right engine even while another plan takes this one's place.
struct Plan {
  explicit Plan(const Budget& of) : budget(of) {}

  const Budget budget;
  std::shared_ptr<Engine> engine;
  std::vector<std::shared_ptr<Weight>> weights;  ///< by the engine's WeightId
  std::unique_ptr<GivesWay> gives_way;           ///< null: the residents do not
};

/// What a session does with one master, until a plan says otherwise.
struct Service {
  /// How an access is served.
  enum class AccessPath : std::uint8_t {
    as_is,     ///< the master is where and what is asked for already
    streamed,  ///< by the engine; copied at each access until the engine's plan knows it
    copied,    ///< by torch, to memory of its own: bytes in RAM that the engine cannot move as they lie (gaps
               ///< between them, a cast that only torch knows, views of a conjugate)
    wrapped,   ///< its inner tensors, which are weights; it is put together around them
    sliced,  ///< its slices along the first dimension, which are weights (dynswap_ext/_swap/expert_slices.py)
    converted,  ///< by torch's own `.to()` at each access, and nothing written on that reaches the master:
                ///< masters on a device, expanded, sparse and quantised ones, subclasses with a `.to()` of
                ///< their own
  };

  bool parameter = true;
  AccessPath path = AccessPath::converted;
  Casting casting = Casting::to_dtype;
  /// Streamed: what is handed out gets the master's class (dynswap_ext/_swap/subclasses.py).
  bool has_subclass = false;
  /// Wrapped: the inner tensors, by their names. Sliced: the slices, with the views that are their masters.
  std::vector<std::pair<py::object, std::shared_ptr<Weight>>> parts;
  std::int64_t slice = -1;  ///< which one it is of a sliced weight; -1: it is none
  SourcePtr source;
  /// The one that `id` belongs to; null: it is moved at each access. The two keep each other, until the
  /// session ends or another plan takes over.
  std::shared_ptr<const Plan> plan;
  WeightId id = 0;
  bool superseded = false;            ///< a later plan has another weight for its master
  std::uint64_t unplanned_since = 0;  ///< the call (Session::calls_) in which it was first met without a plan
  int holders = 0;                    ///< entries of modules that it is the weight of

  /// Whether its copy is a copy of the master's bytes, to which the way back is known.
  bool moves_bytes() const noexcept { return path == AccessPath::streamed || path == AccessPath::copied; }
  bool resident() const { return plan && plan->engine->resident(id); }

  /// Lets go of the master's bytes: the memory is its owner's again.
  void drop_bytes() {
    if (source && source->has_bytes) source = without_bytes(*source);
  }
};

/// What graphs have of one master.
struct GraphNodes {
  GradientNodes gradient;
  GradientNodes stacked;                 ///< sliced: the node that puts the slices' gradients together
  std::shared_ptr<std::uint32_t> given;  ///< times_given(), once that was asked for

  /// How often a forward has given the master other data (Note [Data given inside a forward]).
  const std::shared_ptr<std::uint32_t>& times_given() {
    if (!given) given = std::make_shared<std::uint32_t>(0);
    return given;
  }
};

/// The tensors that a session keeps for good, as they are on the device: a resident's.
struct KeptTensors {
  PyObject* cached = nullptr;          ///< owned
  PyObject* cached_outside = nullptr;  ///< its alias for accesses from outside a forward. Owned
  c10::StreamId cached_stream = 0;     ///< the stream that is known to wait for its copy
  std::uint64_t looked_at = 0;         ///< the call (Session::calls_) in which it was last looked at
  std::uint64_t generation = 0;        ///< rises whenever the session lets go of what it has handed out

  /// Nobody but the session has them. See Note [What CPython has to be like].
  bool only_cached() const {
    if (cached == nullptr) return false;
    if (cached_outside == nullptr) return Py_REFCNT(cached) == 1;
    return Py_REFCNT(cached_outside) == 1 && Py_REFCNT(cached) == 2;  // the alias has it
  }

  /// Drops them; what somebody else still has is handed out again.
  void drop_tensors(DeferredRelease& dropped) {
    ++generation;
    for (PyObject** const kept : {&cached_outside, &cached}) {
      if (*kept == nullptr) continue;
      dropped.tensors.push_back(py::reinterpret_steal<py::object>(std::exchange(*kept, nullptr)));
    }
  }
};

/// One master as a session serves it: what is known of the master, what is done with it, and who has what of
/// it. Owned by the session while its plan has it, by whatever is reading it, and by the tensors handed out
/// of it. LOCK: the GIL guards every field.
struct Weight : MasterRecord, Service, GraphNodes, KeptTensors {
  /// The master's storage; the master counts as alive while it is. (`torch.utils.swap_tensors` refuses a
  /// tensor that has a weak reference itself.)
  c10::weak_intrusive_ptr<c10::StorageImpl> master_storage{c10::intrusive_ptr<c10::StorageImpl>()};
  bool said_lost = false;  ///< the user knows that a write on what was handed out was lost

  std::shared_ptr<Weight> shared_from_this() {
    return std::static_pointer_cast<Weight>(MasterRecord::shared_from_this());
  }

  /// Lets go of what was handed out, which is outdated.
  void forget(DeferredRelease& dropped) {
    forget_latest();
    drop_tensors(dropped);
  }

  /// Takes on what graphs have of a weight in whose place it is.
  void take_nodes(Weight& earlier) {
    earlier.times_given();
    static_cast<GraphNodes&>(*this) = earlier;
    if (parts.size() != earlier.parts.size()) return;
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i].second->take_nodes(*earlier.parts[i].second);
  }

  /// Lets go of the nodes that lead to the master; `if_idle`: of those that nobody else has.
  void release_nodes(DeferredRelease& dropped, bool if_idle = false) {
    for (const auto& [name, part] : parts) part->release_nodes(dropped, if_idle);
    stacked.release(dropped.nodes, if_idle);
    gradient.release(dropped.nodes, if_idle);
  }
};

}  // namespace dynswap
