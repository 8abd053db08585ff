// Session: finding the modules of a tree and giving them their swap classes, and back.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "accelerator/scalars.h"
#include "accelerator/torch_stream.h"
#include "session/calls.h"
#include "session/module_state.h"
#include "session/session.h"

namespace dynswap {

namespace {

/// Whether what a module holds now under a weight's name can take the place that the plan has for that.
bool has_place_for(PyObject* held, const Weight& weight) {
  if (held == nullptr || !THPVariable_Check(held) || !weight.plan) return true;
  const at::Tensor& master = THPVariable_Unpack(held);
  return streamable(master) && static_cast<std::uint64_t>(master.numel()) == weight.source->count &&
         scalar_of(master.scalar_type()) == weight.source->stored;
}

/// What a dict has for a key; null if that is nothing.
py::object find(const py::dict& dict, const py::object& key) {
  PyObject* const found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(found);
}

}  // namespace

/// What will be done to the modules of a tree, before any of it is done.
struct Session::Attaching {
  explicit Attaching(Served found) : tree(std::move(found)) {}

  Served tree;  ///< refers to the entries of `modules`
  struct Module {
    py::object module;
    PyTypeObject* swap;
    std::size_t place;  ///< in the tree
    std::vector<Entry> entries;
  };
  std::vector<Module> modules;
  std::vector<py::object> left;  ///< that another session serves, and this one will not
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

Session::Served Session::requested(const py::list& modules) const {
  Served served{hooks_.plan_request(modules), {}};
  const py::object& request = served.request;
  const auto units = request.attr("units").cast<std::vector<std::uint64_t>>();
  const auto at_once = request.attr("at_once").cast<std::vector<bool>>();
  const auto models = request.attr("models").cast<std::vector<std::uint32_t>>();
  DYNSWAP_CHECK(
      units.size() == modules.size() && at_once.size() == units.size() && models.size() == units.size(),
      "a plan request has a unit, at_once and a model for every module");
  std::vector<WeightTable::Choice>& choices = served.choices;
  choices.resize(units.size());
  for (std::size_t place = 0; place < units.size(); ++place) {
    choices[place].unit.number = units[place];
    choices[place].unit.options.at_once = at_once[place];
    choices[place].unit.options.model = models[place];
  }
  for (const py::handle place : request.attr("left_alone")) choices[place.cast<std::size_t>()].served = false;
  for (const auto& [place, names] : request.attr("keep").cast<py::dict>())
    choices[place.cast<std::size_t>()].keep = py::reinterpret_borrow<py::object>(names);
  for (const auto& [place, names] : request.attr("ignore").cast<py::dict>())
    choices[place.cast<std::size_t>()].ignore = py::reinterpret_borrow<py::object>(names);
  return served;
}

/// `joins`: modules that another session serves stay with it.
std::shared_ptr<Session::Attaching> Session::survey(const py::object& root, const py::object& swap_class,
                                                    bool joins) {
  const std::vector<Visited> found = modules_of(root.ptr());
  auto attaching = std::make_shared<Attaching>(requested(list_of(found)));
  const std::vector<WeightTable::Choice>& choices = attaching->tree.choices;
  const char* const others = joins ? "cast_although_joining" : "kept_in_float32";
  const py::dict exceptions = attaching->tree.request.attr(others)();
  attaching->modules.reserve(found.size());
  for (std::size_t place = 0; place < found.size(); ++place) {
    const Visited& visited = found[place];
    PyObject* const module = visited.module.ptr();
    const py::object dict = module_dict(module);
    if (joins && module_state(module, dict.ptr()) != nullptr) continue;
    PyTypeObject* const swap =
        choices[place].served ? attaching->swap_class(Py_TYPE(module), swap_class) : nullptr;
    if (swap == nullptr) {
      if (!joins && PyDict_Contains(dict.ptr(), Names::get().state) == 1)
        attaching->left.push_back(visited.module);
      continue;
    }
    Attaching::Module plan{visited.module, swap, place, {}};
    const py::object excepted = exceptions.empty() ? py::object() : find(exceptions, py::int_(place));
    for (const bool parameter : {true, false}) {
      PyObject* const held =
          PyDict_GetItemWithError(dict.ptr(), parameter ? Names::get().parameters : Names::get().buffers);
      if (held == nullptr || !PyDict_Check(held)) continue;
      plan.entries.reserve(plan.entries.size() + static_cast<std::size_t>(PyDict_Size(held)));
      PyObject *key = nullptr, *master = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(held, &at, &key, &master) != 0;) {
        PyObject* interned = Py_NewRef(key);
        PyUnicode_InternInPlace(&interned);
        const auto name = py::reinterpret_steal<py::object>(interned);
        if (!attaching->served(swap, name)) continue;
        const bool exception = excepted && excepted.contains(name);
        Casting casting = exception && !joins ? Casting::kept_in_float32 : Casting::to_dtype;
        if (master == Py_None || (joins && !exception)) casting = casting_of_added_master(master);
        plan.entries.push_back({name, parameter, nullptr, casting});
      }
    }
    attaching->modules.push_back(std::move(plan));
  }
  attaching->tree.modules.reserve(attaching->modules.size());
  for (Attaching::Module& module : attaching->modules) {
    attaching->tree.modules.push_back(
        {module_dict(module.module.ptr()), found[module.place].prefix, module.place, &module.entries});
  }
  return attaching;
}

std::size_t Session::attach(const py::object& self, const py::object& root, const py::object& swap_class) {
  const std::shared_ptr<Attaching> attaching = survey(root, swap_class, /*joins=*/true);
  tell_experts_apart(attaching->tree, experts_in(attaching->tree));
  if (!find_weights(attaching->tree, *table_).first.empty()) outdated_ = true;  // they wait for the next plan
  swap(self, *attaching);
  return attaching->modules.size();
}

std::string Session::draft(const py::object& root, const py::object& swap_class,
                           const std::optional<SavedPlan>& saved) {
  std::shared_ptr<Attaching> attaching = survey(root, swap_class, /*joins=*/false);
  std::string difference = draft_first(attaching->tree, saved);
  if (difference.empty()) attaching_ = std::move(attaching);
  return difference;
}

void Session::begin(const py::object& self) {
  DYNSWAP_CHECK(attaching_ != nullptr, "begin() follows draft()");
  const std::shared_ptr<Attaching> attaching = std::move(attaching_);
  plan_first([&] { swap(self, *attaching); });
}

namespace {

/// What a module is to become: its class, and its state (null: none). exchange() makes it so, and keeps what
/// it was, for another exchange() and for whoever has to let go of that.
struct Becomes {
  py::object module;
  py::object dict;
  py::object type;
  py::object state;

  void exchange() {
    PyObject* const key = Names::get().state;
    auto before = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(dict.ptr(), key));
    auto type_before = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(module.ptr())));
    set_class(module.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr()));
    type = std::move(type_before);
    const int failed = state    ? PyDict_SetItem(dict.ptr(), key, state.ptr())
                       : before ? PyDict_DelItem(dict.ptr(), key)
                                : 0;
    if (failed != 0) {
      set_class(module.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr()));
      throw py::error_already_set();
    }
    state = std::move(before);
  }
};

/// A class's own, where it is a swap class.
py::object plain_class(PyTypeObject* type) {
  static PyObject* const key = PyUnicode_InternFromString("_dynswap_original");
  return own_attribute(type, key);
}

}  // namespace

/// Note [An install takes another's place]
/// Other threads may be anywhere in the model while it is installed again, or an install is refused. So an
/// install is drafted first, beside the one that serves: what it can be refused with, it is refused with
/// then. The modules get their new classes and states all at once: the GIL is kept, nothing runs that is not
/// ours, and what is given up is let go afterwards. What was handed out goes on as the new weights'
/// (hand_on()). Only then does a session that serves no module any more let go of its memory, before the new
/// one takes its own. A call that is under way counts as the new session's (Session::succeeded_by()).
void Session::swap(const py::object& self, Attaching& attaching) {
  std::vector<Becomes> changes;
  for (Attaching::Module& next : attaching.modules) {
    changes.push_back({next.module, module_dict(next.module.ptr()),
                       py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(next.swap)),
                       new_module_state(next.module.ptr(), self, std::move(next.entries))});
  }
  for (const py::object& module : attaching.left) {
    py::object original = plain_class(Py_TYPE(module.ptr()));
    if (!original) original = py::type::of(module);
    changes.push_back({module, module_dict(module.ptr()), std::move(original), py::object()});
  }
  std::size_t done = 0;
  try {
    for (; done < changes.size(); ++done) changes[done].exchange();
  } catch (...) {
    while (done > 0) changes[--done].exchange();
    throw;
  }
  std::unordered_map<std::shared_ptr<Session>, std::vector<ModuleState*>> earlier;
  for (const Becomes& change : changes) {
    ModuleState* const state =
        change.state ? as_module_state(change.module.ptr(), change.state.ptr()) : nullptr;
    if (state != nullptr && state->session->get() != this) earlier[*state->session].push_back(state);
  }
  DeferredRelease dropped;
  for (const auto& [session, states] : earlier) take_weights(*session, states, dropped);
  dropped.drop();  // from here on, other threads run
  for (const auto& [session, states] : earlier) {
    if (session->replaced()) session->close();
  }
}

void Session::restore(PyObject* module) {
  const ModuleView view(module);
  if (view.state == nullptr || view.state->session->get() != this) return;
  // A class that was put over the swap class since (a parametrization's) stays.
  if (const py::object original = plain_class(Py_TYPE(module))) {
    set_class(module, reinterpret_cast<PyTypeObject*>(original.ptr()));
  }
  if (PyDict_DelItem(view.dict.ptr(), Names::get().state) != 0) throw py::error_already_set();
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
                                    MappingsOfMasters().of(THPVariable_Unpack(master)), casting);
  if (weight.path == Weight::AccessPath::streamed && !weight.plan) note_unplanned(weight);
  return weight;
}

}  // namespace dynswap
