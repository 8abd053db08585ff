// Session: finding the modules of a tree and giving them their swap classes, and back.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "bindings/attribute.h"
#include "bindings/call.h"
#include "bindings/glue.h"
#include "bindings/session.h"

namespace dynswap {

std::vector<Visited> modules_of(PyObject* root) {
  std::vector<Visited> found;
  std::unordered_set<PyObject*> seen;
  std::vector<Visited> stack{{py::reinterpret_borrow<py::object>(root), ""}};
  while (!stack.empty()) {
    Visited next = std::move(stack.back());
    stack.pop_back();
    if (!seen.insert(next.module.ptr()).second) continue;
    const py::object dict = module_dict(next.module.ptr());
    PyObject* const children = PyDict_GetItemWithError(dict.ptr(), Names::get().modules);
    if (children != nullptr && PyDict_Check(children)) {
      const std::size_t first_child = stack.size();
      PyObject *name = nullptr, *child = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(children, &at, &name, &child) != 0;) {
        if (child == Py_None) continue;
        stack.push_back({py::reinterpret_borrow<py::object>(child),
                         next.prefix + py::cast<std::string>(py::handle(name)) + "."});
      }
      std::reverse(stack.begin() + static_cast<std::ptrdiff_t>(first_child), stack.end());
    }
    found.push_back(std::move(next));
  }
  return found;
}

py::list list_of(const std::vector<Visited>& modules) {
  py::list list;
  for (const Visited& visited : modules) list.append(visited.module);
  return list;
}

namespace {

/// Whether what a module holds now under a weight's name can take the place that the plan has for that.
bool has_place_for(PyObject* held, const Weight& weight) {
  if (held == nullptr || !THPVariable_Check(held) || !weight.plan) return true;
  const at::Tensor& master = THPVariable_Unpack(held);
  return streamable(master) && static_cast<std::uint64_t>(master.numel()) == weight.source->count &&
         scalar_of(master.scalar_type()) == weight.source->stored;
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
  Streamed streamed;
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

/// Whether all parameters can stay on the device: then none is used in another way than others.
bool Session::fits(const py::list& modules, std::optional<std::size_t> budget) const {
  if (!budget) return false;
  std::unordered_set<PyObject*> seen;
  std::size_t bytes = 0;
  for (const py::handle module : modules) {
    const py::object dict = module_dict(module.ptr());
    PyObject* const held = PyDict_GetItemWithError(dict.ptr(), Names::get().parameters);
    if (held == nullptr || !PyDict_Check(held)) continue;
    PyObject *key = nullptr, *master = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(held, &at, &key, &master) != 0;) {
      if (!THPVariable_Check(master) || !seen.insert(master).second) continue;
      const at::Tensor& tensor = THPVariable_Unpack(master);
      if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) continue;
      bytes += static_cast<std::size_t>(tensor.numel()) *
               at::elementSize(wanted_type(tensor, dtype_, Casting::to_dtype));
    }
  }
  return bytes <= *budget;
}

std::vector<WeightTable::Choice> Session::choices_for(const py::list& modules,
                                                      std::optional<std::size_t> budget) const {
  std::vector<WeightTable::Choice> choices;
  for (const py::handle choice : hooks_.choices(modules)) {
    const auto [unit, at_once, model, served, keep, ignore] =
        choice.cast<std::tuple<std::uint64_t, bool, std::uint32_t, bool, py::object, py::object>>();
    choices.push_back(
        {{.number = unit, .options = {.at_once = at_once, .model = model}}, served, keep, ignore});
  }
  DYNSWAP_CHECK(choices.size() == modules.size(), "there is a choice for every module");
  if (fits(modules, budget)) return choices;
  const auto experts = hooks_.experts(modules).cast<std::vector<std::pair<std::int64_t, std::int64_t>>>();
  DYNSWAP_CHECK(experts.size() == modules.size(), "every module is looked at");
  for (std::size_t i = 0; i < choices.size(); ++i) {
    WeightTable::Unit& unit = choices[i].unit;
    unit.slices = experts[i].first;
    if (experts[i].second < 0) continue;
    unit.number = static_cast<std::uint64_t>(experts[i].second);
    unit.options.by_use = true;
  }
  return choices;
}

std::size_t Session::attach(const py::object& self, const py::object& root, const py::object& swap_class) {
  const Mappings mappings = Mappings::of_this_process();
  Attaching attaching;
  const std::vector<Visited> found = modules_of(root.ptr());
  const py::list tree = list_of(found);
  const std::vector<WeightTable::Choice> choices = choices_for(tree, options_.budget);
  const bool joins = had_first_plan_;
  // Names that are treated in another way than the others: see Note [What dtype= casts].
  const py::object& ask = joins ? hooks_.cast_as_copies : hooks_.kept_in_float32;
  const py::dict exceptions = ask(tree, dtype_);
  for (std::size_t place = 0; place < found.size(); ++place) {
    const Visited& visited = found[place];
    PyObject* const module = visited.module.ptr();
    const py::object dict = module_dict(module);
    if (module_state(module, dict.ptr()) != nullptr) continue;  // it has been installed before
    if (!choices[place].served) continue;
    PyTypeObject* const swap = attaching.swap_class(Py_TYPE(module), swap_class);
    if (swap == nullptr) continue;
    Attaching::Module plan{module, swap, {}};
    const py::int_ at_place(place);
    const py::object excepted = exceptions.attr("get")(at_place, py::tuple());
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
        const bool exception = excepted.contains(name);
        Casting casting = exception && !joins ? Casting::kept_in_float32 : Casting::to_dtype;
        if (master == Py_None || (joins && !exception)) casting = casting_of_added_master(master);
        plan.entries.push_back({name, parameter, nullptr, casting});
      }
    }
    table_->find_weights(dict.ptr(), visited.prefix, choices[place], mappings, plan.entries,
                         attaching.streamed);
    attaching.modules.push_back(std::move(plan));
  }
  if (!std::exchange(had_first_plan_, true)) {
    plan_first(attaching.streamed);
  } else if (!attaching.streamed.empty()) {
    outdated_ = true;  // weights that join an install wait for the next plan
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
  for (const Visited& visited : modules_of(root.ptr())) restore(visited.module.ptr());
}

/// How a master is cast that a module registers after the install: see Note [What dtype= casts].
Casting Session::casting_of_added_master(PyObject* master) const {
  if (!THPVariable_Check(master)) return Casting::never_narrowed;
  const c10::TensorImpl& impl = *THPVariable_Unpack(master).unsafeGetTensorImpl();
  const Weight* const known = table_->find(&impl);
  return known != nullptr && known->state.same_place(impl) ? known->casting : Casting::never_narrowed;
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
  PyObject* const master =
      find_in(dict.ptr(), parameter ? Names::get().parameters : Names::get().buffers, interned);
  for (Entry& entry : *state->entries) {
    if (entry.name.ptr() != name.ptr()) continue;
    if (entry.parameter != parameter) entry = {name, parameter, nullptr, entry.casting, entry.ignored};
    if (entry.weight != nullptr && !inside_call_of(*this) && !has_place_for(master, *entry.weight))
      outdated_ = true;
    return;
  }
  const Casting casting = master == nullptr ? Casting::never_narrowed : casting_of_added_master(master);
  state->entries->push_back({name, parameter, nullptr, casting});
}

Weight& Session::added_weight(PyObject* master, PyObject* name, bool parameter, Casting casting) {
  const std::shared_ptr<WeightTable> table = table_;
  table->sweep();
  Weight& weight = table->weight_of(master, py::cast<std::string>(py::handle(name)), parameter,
                                    mappings_of(THPVariable_Unpack(master)), casting);
  if (weight.path == Weight::AccessPath::streamed && !weight.plan) note_unplanned(weight);
  return weight;
}

}  // namespace dynswap
