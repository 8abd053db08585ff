// Session: finding the modules of a tree and giving them their swap classes, and back.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "bindings/attribute.h"
#include "bindings/backends.h"
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

/// What attach() will do, before it does any of it.
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
    if (is_new) entry->second = make(py::handle(reinterpret_cast<PyObject*>(original)));
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
  std::uint64_t unit = 0;
  for (const Visited& visited : modules_of(root.ptr())) {
    PyTypeObject* const swap = attaching.swap_class(Py_TYPE(visited.module), swap_class);
    if (swap == nullptr) continue;
    Attaching::Module plan{visited.module, swap, {}};
    ++unit;
    const py::object dict = module_dict(visited.module);
    for (const bool parameter : {true, false}) {
      PyObject* const held =
          PyDict_GetItemWithError(dict.ptr(), parameter ? Names::get().parameters : Names::get().buffers);
      if (held == nullptr || !PyDict_Check(held)) continue;
      PyObject *key = nullptr, *master = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(held, &at, &key, &master) != 0;) {
        PyObject* interned = Py_NewRef(key);
        PyUnicode_InternInPlace(&interned);
        const auto name = py::reinterpret_steal<py::object>(interned);
        if (!attaching.served(swap, name)) continue;
        Entry entry{name, parameter, nullptr};
        if (THPVariable_Check(master)) {
          const std::size_t known = weights_.size();
          entry.weight =
              &weight_of(master, visited.prefix + py::cast<std::string>(name), parameter, mappings);
          if (weights_.size() > known && entry.weight->way == Weight::Way::streamed) {
            attaching.streamed.emplace_back(entry.weight, unit);
          }
        }
        plan.entries.push_back(std::move(entry));
      }
    }
    attaching.modules.push_back(std::move(plan));
  }
  plan(attaching.streamed);

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

void Session::restore(PyObject* module) {
  const py::object dict = module_dict(module);
  ModuleState* const state = module_state(module, dict.ptr());
  if (state == nullptr || state->session->get() != this) return;
  // A class that was put over the swap class since (a parametrization's) stays.
  static PyObject* const key = PyUnicode_InternFromString("_dynswap_original");
  if (PyObject* const original = PyDict_GetItemWithError(Py_TYPE(module)->tp_dict, key)) {
    set_class(module, reinterpret_cast<PyTypeObject*>(original));
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
                           const Mappings& mappings) {
  Weight*& known = by_master_[THPVariable_Unpack(master).unsafeGetTensorImpl()];
  if (known != nullptr && known->state.impl != nullptr &&
      known->state == MasterState::of(*THPVariable_Unpack(master).unsafeGetTensorImpl())) {
    return *known;
  }
  weights_.push_back(std::make_unique<Weight>());
  known = weights_.back().get();
  known->name = name;
  known->parameter = parameter;
  classify(*known, master, mappings);
  return *known;
}

Weight& Session::late_weight(PyObject* master, PyObject* name, bool parameter) {
  Weight& weight =
      weight_of(master, py::cast<std::string>(py::handle(name)), parameter, Mappings::of_this_process());
  // The engine has made its plan without it.
  if (weight.way == Weight::Way::streamed && !weight.planned) weight.way = Weight::Way::converted;
  return weight;
}

void Session::plan(const std::vector<std::pair<Weight*, std::uint64_t>>& streamed) {
  std::vector<SourcePtr> sources;
  sources.reserve(streamed.size());
  for (const auto& [weight, unit] : streamed) sources.push_back(weight->source);
  if (options_.pin.value_or(true))
    pinned_ = pin_sources(device_, sources, [this](const std::string& why) { warn_(why); });
  for (std::size_t i = 0; i < streamed.size(); ++i) {
    const auto& [weight, unit] = streamed[i];
    weight->source = sources[i];
    weight->id = engine_->add_weight(sources[i], unit);
    weight->planned = true;
    by_id_.push_back(weight);
  }
  const py::gil_scoped_release release;
  engine_->plan();
}

}  // namespace dynswap
