// What an installed module carries, and what is found in a module.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

#include "session/weight.h"

namespace dynswap {

class Session;

/// One managed name of one module.
struct Entry {
  py::object name;                 ///< interned: compared by identity
  bool parameter = true;           ///< in `_parameters`; else in `_buffers`
  std::shared_ptr<Weight> weight;  ///< null while the module holds None under the name
  Casting casting = Casting::to_dtype;
  bool ignored = false;  ///< the master is left alone, and handed out as it is

  void bind(std::shared_ptr<Weight> other) noexcept {
    if (weight != nullptr) --weight->holders;
    weight = std::move(other);
    if (weight != nullptr) ++weight->holders;
  }
};

/// What an installed module carries in its __dict__ under "_dynswap". `owner`, and `dict`, its __dict__, are
/// compared alone: a copy of the __dict__ in another module (DataParallel's replicas) is recognised by them
/// and serves nothing, and another object that has this very __dict__ (torch.export's stand-in for a module
/// of two names) is served as the module is.
struct ModuleState {
  PyObject_HEAD PyObject* owner;
  PyObject* dict;
  PyObject* session_object;  ///< the session as Python sees it, so that weak references to it hold; owned
  std::shared_ptr<Session>* session;
  std::vector<Entry>* entries;
};

/// Interned names of the __dict__ entries that matter.
struct Names {
  PyObject* state;
  PyObject* parameters;
  PyObject* buffers;
  PyObject* modules;
  PyObject* training;
  static const Names& get();
};

/// What `dict[container][name]` is, if anything; a borrowed reference.
PyObject* find_in(PyObject* dict, PyObject* container, PyObject* name);

/// The module's own __dict__, and its state if the module is installed (a borrowed reference).
py::object module_dict(PyObject* module);
ModuleState* module_state(PyObject* module, PyObject* dict);
/// What the module of this __dict__ has as the master of an entry now, if that is a tensor; a borrowed
/// reference.
PyObject* master_of(PyObject* dict, const Entry& entry);

/// A module's own __dict__, and its state if it is installed.
struct ModuleView {
  explicit ModuleView(PyObject* module)
      : dict(module_dict(module)), state(module_state(module, dict.ptr())) {}

  /// The entry of a name; null if there is none, or no install.
  Entry* entry(const py::object& name) const;
  PyObject* master(const Entry& entry) const { return master_of(dict.ptr(), entry); }

  const py::object dict;
  ModuleState* const state;  ///< a borrowed reference
};

/// The state that `object` is, which is or was in the module's __dict__; null if it is none, or another
/// module's.
ModuleState* as_module_state(PyObject* module, PyObject* object) noexcept;

/// A module in a tree, and the prefix of its weights' names ("layers.0.").
struct Visited {
  py::object module;
  std::string prefix;
};

/// The modules of a tree, each once, in the order of nn.Module.modules().
std::vector<Visited> modules_of(PyObject* root);

/// The modules alone, for Python.
py::list list_of(const std::vector<Visited>& modules);

/// Note [A resident's tensor keeps its master alive]
/// It is connected to the master in the autograd graph, in C++, where Python's garbage collector does not
/// look. If the master refers back to its module, by an attribute (`p.weight_loader = module.load`) or a
/// hook, the model would never be collected. So the session keeps no tensor of such a master between
/// accesses. Returns whether the master has hooks, or attributes that may refer to other objects.
bool may_refer_back(PyObject* master);

/// A new state for `module`. Does not touch the module.
py::object new_module_state(PyObject* module, const py::object& session, std::vector<Entry> entries);

/// What a class has under `name` in its own namespace, if anything; no base is asked.
py::object own_attribute(PyTypeObject* type, PyObject* name);

/// Gives `module` another class, as `object.__class__.__set__` does: no code of the module's runs.
void set_class(PyObject* module, PyTypeObject* type);

/// Makes the type `ModuleState`. Once, before the first state.
void define_module_state();

}  // namespace dynswap
