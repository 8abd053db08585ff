// Session: finding the modules of a tree and giving them their swap classes, and back.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "bindings/attribute.h"
#include "bindings/backends.h"
#include "bindings/call.h"
#include "bindings/session.h"

namespace dynswap {

namespace {

/// A module in the tree, in the order of nn.Module.modules().
struct Visited {
  PyObject* module;  ///< borrowed: the tree holds it
  std::string prefix;
};

std::vector<Visited> modules_of(PyObject* root) {
  std::vector<Visited> found;
  std::unordered_set<PyObject*> seen;
  std::vector<Visited> stack{{root, ""}};
  while (!stack.empty()) {
    Visited next = std::move(stack.back());
    stack.pop_back();
    if (!seen.insert(next.module).second) continue;
    const py::object dict = module_dict(next.module);
    PyObject* const children = PyDict_GetItemWithError(dict.ptr(), Names::get().modules);
    if (children != nullptr && PyDict_Check(children)) {
      const std::size_t first_child = stack.size();
      PyObject *name = nullptr, *child = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(children, &at, &name, &child) != 0;) {
        if (child == Py_None) continue;
        stack.push_back({child, next.prefix + py::cast<std::string>(py::handle(name)) + "."});
      }
      std::reverse(stack.begin() + static_cast<std::ptrdiff_t>(first_child), stack.end());
    }
    found.push_back(std::move(next));
  }
  return found;
}

}  // namespace

/// What an attach will do, before it does any of it.
struct Session::Attaching {
  struct Module {
    PyObject* module;
    PyTypeObject* swap;
    std::vector<Entry> entries;
  };
  std::vector<Module> modules;
  std::vector<std::pair<Weight*, std::uint64_t>> streamed;  ///< with the module that they belong to
  std::unordered_map<PyTypeObject*, py::object> swap_classes;
  /// Names whose descriptor the swap class has (true), or that the class keeps for itself.
  std::unordered_map<PyTypeObject*, std::unordered_map<PyObject*, bool>> names;

  PyTypeObject* swap_class(PyTypeObject* original, const py::object& make) {
    const auto [entry, is_new] = swap_classes.try_emplace(original);
    if (is_new) {
      entry->second = make(py::handle(reinterpret_cast<PyObject*>(original)));
      if (!entry->second.is_none()) serve_calls(reinterpret_cast<PyTypeObject*>(entry->second.ptr()));
    }
    return entry->second.is_none() ? nullptr : reinterpret_cast<PyTypeObject*>(entry->second.ptr());
  }

  bool served(PyTypeObject* swap, const py::object& name) {
    const auto [entry, is_new] = names[swap].try_emplace(name.ptr(), false);
    if (is_new) {
      entry->second =
          py::handle(reinterpret_cast<PyObject*>(swap)).attr("_dynswap_ensure")(name).cast<bool>();
    }
    return entry->second;
  }
};

std::size_t Session::attach(const py::object& self, const py::object& root, const py::object& swap_class) {
  const Mappings mappings = Mappings::of_this_process();
  Attaching attaching;
  for (const Visited& visited : modules_of(root.ptr())) {
    const py::object dict = module_dict(visited.module);
    if (module_state(visited.module, dict.ptr()) != nullptr) continue;  // it has been installed before
    PyTypeObject* const swap = attaching.swap_class(Py_TYPE(visited.module), swap_class);
    if (swap == nullptr) continue;
    Attaching::Module plan{visited.module, swap, {}};
    for (const bool parameter : {true, false}) {
      PyObject* const held =
          PyDict_GetItemWithError(dict.ptr(), parameter ? Names::get().parameters : Names::get().buffers);
      if (held == nullptr || !PyDict_Check(held)) continue;
      PyObject *key = nullptr, *master = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(held, &at, &key, &master) != 0;) {
        PyObject* interned = Py_NewRef(key);
        PyUnicode_InternInPlace(&interned);
        const auto name = py::reinterpret_steal<py::object>(interned);
        if (attaching.served(swap, name)) plan.entries.push_back({name, parameter, nullptr});
      }
    }
    find_weights(dict.ptr(), visited.prefix, attaching.modules.size(), mappings, plan.entries,
                 attaching.streamed);
    attaching.modules.push_back(std::move(plan));
  }
  if (!std::exchange(planned_, true)) {
    plan(attaching.streamed);
  } else {
    outdated_ = true;  // modules that join an install wait for the next plan
  }

  std::size_t done = 0;
  try {
    for (; done < attaching.modules.size(); ++done) {
      Attaching::Module& next = attaching.modules[done];
      const py::object dict = module_dict(next.module);
      const py::object state = new_module_state(next.module, self, std::move(next.entries));
      set_class(next.module, next.swap);
      if (PyDict_SetItem(dict.ptr(), Names::get().state, state.ptr()) != 0) throw py::error_already_set();
    }
  } catch (...) {
    for (std::size_t i = 0; i <= done && i < attaching.modules.size(); ++i) {
      restore(attaching.modules[i].module);
    }
    throw;
  }
  return done;
}

void Session::find_weights(PyObject* module_dict, const std::string& prefix, std::uint64_t unit,
                           const Mappings& mappings, std::vector<Entry>& entries,
                           std::vector<std::pair<Weight*, std::uint64_t>>& streamed) {
  for (Entry& entry : entries) {
    entry.bind(nullptr);
    PyObject* const master = find_in(
        module_dict, entry.parameter ? Names::get().parameters : Names::get().buffers, entry.name.ptr());
    if (master == nullptr || !THPVariable_Check(master)) continue;
    const std::size_t known = weights_.size();  // a wrapper brings its inner tensors along
    entry.bind(&weight_of(master, prefix + py::cast<std::string>(entry.name), entry.parameter, mappings));
    for (std::size_t i = known; i < weights_.size(); ++i) {
      if (weights_[i]->way == Weight::Way::streamed) streamed.emplace_back(weights_[i].get(), unit);
    }
  }
}

void Session::plan_again(const py::object& root) {
  const std::shared_ptr<Session> self = shared_from_this();
  flush();
  outdated_ = false;
  std::vector<std::unique_ptr<Weight>> old_weights = std::exchange(weights_, {});
  const auto old_by_master = std::exchange(by_master_, {});
  const auto old_by_id = std::exchange(by_id_, {});
  const auto old_engine = std::exchange(engine_, nullptr);
  const auto old_holds = std::exchange(holds_, std::make_shared<Holds>());
  const bool old_streams = streams_any_;
  std::vector<std::pair<ModuleState*, std::vector<Weight*>>> old_entries;
  bool old_is_gone = false;
  const auto make_room = [&] {
    old_is_gone = true;
    DeferredRelease dropped;
    for (const auto& weight : old_weights) weight->forget(dropped);
    dropped.drop();
    const py::gil_scoped_release release;
    old_engine->close();
  };
  try {
    engine_ = new_engine();
    const Mappings mappings = Mappings::of_this_process();
    std::vector<std::pair<Weight*, std::uint64_t>> streamed;
    std::uint64_t unit = 0;
    for (const Visited& visited : modules_of(root.ptr())) {
      const py::object dict = module_dict(visited.module);
      ModuleState* const state = module_state(visited.module, dict.ptr());
      if (state == nullptr || state->session->get() != this) continue;
      auto& [kept, weights] = old_entries.emplace_back(state, std::vector<Weight*>());
      for (const Entry& entry : *state->entries) weights.push_back(entry.weight);
      find_weights(dict.ptr(), visited.prefix, ++unit, mappings, *state->entries, streamed);
    }
    plan(streamed, make_room);
  } catch (...) {
    for (const auto& [state, weights] : old_entries) {
      for (std::size_t i = 0; i < weights.size(); ++i) (*state->entries)[i].bind(weights[i]);
    }
    weights_ = std::move(old_weights);
    by_master_ = old_by_master;
    by_id_ = old_by_id;
    engine_ = old_engine;
    holds_ = old_holds;
    to_pin_.clear();
    streams_any_ = old_streams;
    if (old_is_gone) {
      for (const auto& weight : weights_) weight->planned = false;
      outdated_ = true;  // there may be room another time
      captured_ = false;
    }
    throw;
  }
  if (!old_is_gone) make_room();  // closed by another thread, meanwhile
  Stats counters = old_engine->stats();
  counters.add_counters(beside_);
  beside_ = counters;
  residents_read_.clear();
  DeferredRelease dropped;
  for (auto& weight : old_weights) {
    weight->forget(dropped);
    weight->planned = false;
    weight->let_go_of_bytes();
    weight->watch = nullptr;  // the new one, of the same master, has its own
    superseded_.push_back(std::move(weight));
  }
  old_holds->end();
  if (std::exchange(captured_, false)) {
    warn_(
        "a new plan put weights elsewhere on the device: CUDA graphs that were captured with this model are "
        "not valid any more; capture them again");
  }
}

void Session::restore(PyObject* module) {
  const py::object dict = module_dict(module);
  ModuleState* const state = module_state(module, dict.ptr());
  if (state == nullptr || state->session->get() != this) return;
  // A class that was put over the swap class since (a parametrization's) stays.
  static PyObject* const key = PyUnicode_InternFromString("_dynswap_original");
  if (const py::object original = own_attribute(Py_TYPE(module), key)) {
    set_class(module, reinterpret_cast<PyTypeObject*>(original.ptr()));
  }
  if (PyDict_DelItem(dict.ptr(), Names::get().state) != 0) throw py::error_already_set();
}

void Session::detach(const py::object& root) {
  const std::shared_ptr<Session> self = shared_from_this();
  flush();
  for (const Visited& visited : modules_of(root.ptr())) restore(visited.module);
}

void Session::adopt(const py::object& module, const py::object& name_given) {
  const py::object dict = module_dict(module.ptr());
  ModuleState* const state = module_state(module.ptr(), dict.ptr());
  if (state == nullptr) return;
  PyObject* interned = Py_NewRef(name_given.ptr());
  PyUnicode_InternInPlace(&interned);
  const auto name = py::reinterpret_steal<py::object>(interned);
  PyObject* const parameters = PyDict_GetItemWithError(dict.ptr(), Names::get().parameters);
  const bool parameter = parameters != nullptr && PyDict_Contains(parameters, name.ptr()) == 1;
  for (Entry& entry : *state->entries) {
    if (entry.name.ptr() != name.ptr()) continue;
    if (entry.parameter != parameter) entry = {name, parameter, nullptr};
    return;
  }
  state->entries->push_back({name, parameter, nullptr});
}

Weight& Session::weight_of(PyObject* master, const std::string& name, bool parameter,
                           const Mappings& mappings, bool exact) {
  Weight*& known = by_master_[THPVariable_Unpack(master).unsafeGetTensorImpl()];
  if (known != nullptr && known->state.impl != nullptr &&
      known->state.is_of(*THPVariable_Unpack(master).unsafeGetTensorImpl())) {
    return *known;
  }
  weights_.push_back(std::make_unique<Weight>());
  Weight& weight = *weights_.back();
  known = &weight;  // before the inner tensors' entries, which may move it
  weight.name = name;
  weight.parameter = parameter;
  weight.exact = exact;
  classify(weight, master, mappings);
  return weight;
}

Weight& Session::late_weight(PyObject* master, PyObject* name, bool parameter) {
  Weight& weight =
      weight_of(master, py::cast<std::string>(py::handle(name)), parameter, Mappings::of_this_process());
  // The engine has made its plan without it.
  if (weight.way == Weight::Way::streamed && !weight.planned) outdated_ = true;
  return weight;
}

void Session::plan(const std::vector<std::pair<Weight*, std::uint64_t>>& streamed,
                   const std::function<void()>& make_room) {
  std::vector<Weight*> weights;
  for (const auto& [weight, unit] : streamed) weights.push_back(weight);
  to_pin_.clear();
  pin(weights);
  if (closed_) return;  // by another thread, meanwhile
  for (const auto& [weight, unit] : streamed) {
    weight->id = engine_->add_weight(weight->source, unit);
    by_id_.push_back(weight);
  }
  {
    const py::gil_scoped_release release;
    engine_->arrange();
  }
  if (make_room) make_room();
  {
    const py::gil_scoped_release release;
    engine_->plan();
  }
  for (const auto& [weight, unit] : streamed) {
    // Not those whose masters have changed while other threads could run.
    weight->planned = engine_->source(weight->id) == weight->source;
  }
  streams_any_ = false;
  for (const auto& [weight, unit] : streamed) streams_any_ = streams_any_ || streams(*weight);
}

}  // namespace dynswap
