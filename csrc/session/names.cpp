// Session: what is asked of one module, by the names of its masters.
#include "accelerator/torch_stream.h"
#include "session/calls.h"
#include "session/module_state.h"
#include "session/session.h"

namespace dynswap {

py::object Session::fetch_buffer(const py::object& module, const py::object& name) {
  const py::object dict = module_dict(module.ptr());
  ModuleState* const state = module_state(module.ptr(), dict.ptr());
  PyObject* const master = find_in(dict.ptr(), Names::get().buffers, name.ptr());
  if (state == nullptr || master == nullptr || !THPVariable_Check(master)) {
    throw py::attribute_error("the module has no buffer of the name " + py::cast<std::string>(name));
  }
  const auto keep_master = py::reinterpret_borrow<py::object>(master);
  const bool training = PyDict_GetItemWithError(dict.ptr(), Names::get().training) == Py_True;
  const InsideCall compiled(nullptr);
  for (Entry& entry : *state->entries) {
    if (entry.parameter || entry.ignored || !entry.name.equal(name)) continue;
    const std::shared_ptr<Weight> weight =
        entry.weight == nullptr
            ? added_weight(master, entry.name.ptr(), /*parameter=*/false, entry.casting).shared_from_this()
            : weight_now(*entry.weight, master, entry.name.ptr()).shared_from_this();
    entry.bind(weight);
    return py::reinterpret_steal<py::object>(access(*weight, master, training, /*inside=*/true));
  }
  return keep_master;
}

std::optional<at::ScalarType> Session::dtype_of(const py::object& module, const py::object& name) const {
  const py::object dict = module_dict(module.ptr());
  const ModuleState* const state = module_state(module.ptr(), dict.ptr());
  if (state == nullptr) return options_.dtype;
  for (const Entry& entry : *state->entries) {
    if (!entry.name.equal(name)) continue;
    PyObject* const master = find_in(
        dict.ptr(), entry.parameter ? Names::get().parameters : Names::get().buffers, entry.name.ptr());
    if (master == nullptr || !THPVariable_Check(master)) break;
    const Casting casting = entry.ignored ? Casting::never : entry.casting;
    return wanted_type(THPVariable_Unpack(master), options_.dtype, casting);
  }
  return options_.dtype;
}

void Session::keep_dtype(const py::object& module, const py::object& name) {
  const py::object dict = module_dict(module.ptr());
  const ModuleState* const state = module_state(module.ptr(), dict.ptr());
  if (state == nullptr) return;
  for (Entry& entry : *state->entries) {
    if (!entry.name.equal(name)) continue;
    entry.casting = Casting::never;
    if (entry.weight == nullptr) continue;
    if (entry.weight->holders > 1) {
      entry.bind(nullptr);  // the other modules' stays as it is
    } else {
      entry.weight->casting = Casting::never;
    }
  }
}

py::dict Session::services(const py::object& module) const {
  py::dict services;
  for_entries(module, [&](const Entry& entry, PyObject*) {
    const Weight& weight = *entry.weight;
    const char* service = stays(weight) ? "resident" : "streamed";
    if (weight.path == Weight::AccessPath::as_is) service = "in place";
    if (weight.path == Weight::AccessPath::converted) service = "converted";
    services[entry.name] = service;
  });
  const py::object dict = module_dict(module.ptr());
  if (const ModuleState* const state = module_state(module.ptr(), dict.ptr())) {
    for (const Entry& entry : *state->entries) {
      if (entry.ignored) services[entry.name] = "ignored";
    }
  }
  return services;
}

}  // namespace dynswap
