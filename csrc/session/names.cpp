// Session: what is asked of one module, by the names of its masters.
#include "accelerator/torch_stream.h"
#include "session/calls.h"
#include "session/module_state.h"
#include "session/session.h"

namespace dynswap {

py::object Session::fetch_buffer(const py::object& module, const py::object& name) {
  const ModuleView view(module.ptr());
  PyObject* const master = find_in(view.dict.ptr(), Names::get().buffers, name.ptr());
  if (view.state == nullptr || master == nullptr || !THPVariable_Check(master)) {
    throw py::attribute_error("the module has no buffer of the name " + py::cast<std::string>(name));
  }
  const auto keep_master = py::reinterpret_borrow<py::object>(master);
  Entry* const entry = view.entry(name);
  if (entry == nullptr || entry->parameter || entry->ignored) return keep_master;
  const bool training = PyDict_GetItemWithError(view.dict.ptr(), Names::get().training) == Py_True;
  const InsideCall compiled(nullptr);
  const std::shared_ptr<Weight> weight =
      entry->weight == nullptr
          ? added_weight(master, entry->name.ptr(), /*parameter=*/false, entry->casting).shared_from_this()
          : weight_now(*entry->weight, master, entry->name.ptr()).shared_from_this();
  entry->bind(weight);
  return py::reinterpret_steal<py::object>(access(*weight, master, training, /*inside=*/true));
}

std::optional<at::ScalarType> Session::dtype_of(const py::object& module, const py::object& name) const {
  const ModuleView view(module.ptr());
  const Entry* const entry = view.entry(name);
  PyObject* const master = entry == nullptr ? nullptr : view.master(*entry);
  if (master == nullptr) return options_.dtype;
  const Casting casting = entry->ignored ? Casting::never : entry->casting;
  return wanted_type(THPVariable_Unpack(master), options_.dtype, casting);
}

void Session::keep_dtype(const py::object& module, const py::object& name) {
  Entry* const entry = ModuleView(module.ptr()).entry(name);
  if (entry == nullptr) return;
  entry->casting = Casting::never;
  if (entry->weight == nullptr) return;
  if (entry->weight->holders > 1) {
    entry->bind(nullptr);  // the other modules' stays as it is
  } else {
    entry->weight->casting = Casting::never;
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
  if (const ModuleState* const state = ModuleView(module.ptr()).state) {
    for (const Entry& entry : *state->entries) {
      if (entry.ignored) services[entry.name] = "ignored";
    }
  }
  return services;
}

}  // namespace dynswap
