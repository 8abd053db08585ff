// The extension module dynswap_ext._C.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/headeronly/version.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerator/backends.h"
#include "accelerator/capabilities.h"
#include "accelerator/giving_way.h"
#include "core/host_memory.h"
#include "host/host_backend.h"
#include "io/file.h"
#include "platform/process.h"
#include "python/attribute.h"
#include "python/call.h"
#include "python/host_register.h"
#include "python/interpreter.h"
#include "python/lossless.h"
#include "session/calls.h"
#include "session/errors.h"
#include "session/module_state.h"
#include "session/session.h"
#include "sim/roofline.h"
#include "tensor/handed_out.h"
#include "tensor/shared_memory.h"
#include "tensor/written_buffers.h"
#include "transfer/staging.h"

namespace dynswap {

namespace {

py::dict as_dict(const Stats& stats) {
  py::dict figures;
  for (const Stat& stat : kStats) figures[stat.name] = stats.*stat.figure;
  return figures;
}

py::dict capabilities(const c10::Device& device) {
  Capabilities found;
  {
    const py::gil_scoped_release release;
    found = capabilities_of(device, host_register_for(device));
  }
  py::dict dict;
  dict["obstacle"] = found.obstacle;
  dict["copy_stream"] = found.copy_stream;
  dict["pinned_memory"] = found.pinned_memory;
  dict["page_locking"] = found.page_locking;
  dict["free_memory_callback_obstacle"] = obstacle_to_free_memory_callbacks(device);
  return dict;
}

#ifdef _MSC_VER
constexpr const char* kCompiler = "Microsoft's";
#else
constexpr const char* kCompiler = __VERSION__;
#endif

/// From what the bindings were built: the build gives it to the unit with this file
/// (dynswap_ext/_sources.py).
#ifndef DYNSWAP_BINDINGS
#define DYNSWAP_BINDINGS ""
#endif

py::dict build_info() {
  py::dict info;
  info["bindings"] = DYNSWAP_BINDINGS;
  info["torch"] = TORCH_VERSION;
  info["cuda"] = cuda_version();
  info["compiler"] = kCompiler;
  return info;
}

using LayerTuple = std::tuple<std::string, std::uint64_t, double, std::uint64_t>;
using PlaceTuple = std::tuple<std::string, std::uint64_t, bool>;
using Places = std::vector<std::optional<PlaceTuple>>;
using ByUse = std::map<std::uint64_t, double>;                     ///< by unit
using AlsoIn = std::map<std::size_t, std::vector<std::uint64_t>>;  ///< by the number of the weight

sim::Workload workload_of(const std::vector<LayerTuple>& weights, const Places& places,
                          const std::string& backend, const std::set<std::uint64_t>& at_once,
                          const ByUse& by_use, const AlsoIn& also_in) {
  if (backend != "host" && backend != "cuda" && backend != "torch") {
    throw py::value_error("backend is '" + backend + "'; expected 'host', 'cuda' or 'torch'");
  }
  if (!places.empty() && places.size() != weights.size()) throw py::value_error("a place for each weight");
  sim::Workload workload;
  if (backend == "host") workload.device = HostBackend::kTraits;
  for (const auto& [name, bytes, seconds, unit] : weights)
    workload.layers.push_back({name, bytes, seconds, unit, at_once.contains(unit)});
  for (sim::Layer& layer : workload.layers) {
    const auto expert = by_use.find(layer.unit);
    if (expert == by_use.end()) continue;
    if (!(expert->second > 0 && expert->second <= 1))
      throw py::value_error("by_use is a part of the experts");
    layer.by_use = expert->second;
  }
  for (const auto& [weight, units] : also_in) workload.layers.at(weight).also_in = units;
  std::map<std::string, std::shared_ptr<const File>> files;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (!places[i]) continue;
    const auto& [path, offset, cast] = *places[i];
    std::shared_ptr<const File>& file = files[path];
    if (!file) file = File::open(path);
    sim::Layer& layer = workload.layers[i];
    layer.file = file;
    layer.offset = offset;
    layer.cast = cast;
  }
  return workload;
}

py::tuple smallest_budget(const std::vector<LayerTuple>& weights, const Places& places,
                          const std::string& backend, const std::set<std::uint64_t>& at_once,
                          const ByUse& by_use, const AlsoIn& also_in) {
  const sim::LargestGroup largest =
      sim::largest_group(workload_of(weights, places, backend, at_once, by_use, also_in));
  return py::make_tuple(largest.bytes, largest.layers);
}

py::dict simulate(const std::vector<LayerTuple>& weights, std::size_t budget, std::uint32_t prefetch,
                  double bandwidth, double latency, int passes, const std::string& placement,
                  const Places& places, const std::string& backend, const std::set<std::uint64_t>& at_once,
                  const ByUse& by_use, const AlsoIn& also_in, std::optional<std::pair<double, double>> host,
                  std::optional<std::pair<std::size_t, double>> mesh) {
  if (placement != "even" && placement != "timed") {
    throw py::value_error("placement is '" + placement + "'; expected 'even' or 'timed'");
  }
  const auto residents = placement == "timed" ? sim::Residents::by_time : sim::Residents::even;
  sim::Workload workload = workload_of(weights, places, backend, at_once, by_use, also_in);
  if (host) workload.host = sim::HostTimes{host->first, host->second};
  if (mesh) workload.mesh = sim::Mesh{mesh->first, mesh->second};
  EngineOptions options;
  options.budget = budget;
  options.prefetch = prefetch;
  sim::Result result;
  {
    const py::gil_scoped_release release;
    result = sim::simulate(workload, options, bandwidth, latency, passes, residents);
  }
  py::dict out;
  out["seconds_per_pass"] = result.seconds;
  out["compute_seconds"] = result.compute_seconds;
  out["copy_seconds"] = result.copy_seconds;
  out["link_seconds"] = result.link_seconds;
  out["limit_seconds"] = result.limit_seconds;
  out["ratio"] = result.ratio;
  out["stall_seconds"] = result.stall_seconds;
  out["misses"] = result.misses;
  out["moved_bytes"] = result.moved_bytes;
  out["streamed_bytes"] = result.streamed_bytes;
  out["resident_bytes"] = result.resident_bytes;
  out["arena_bytes"] = result.arena_bytes;
  out["groups"] = result.groups;
  out["copies"] = result.copies;
  out["gathered"] = result.gathered;
  out["slot_bytes"] = result.slot_bytes;
  out["depth"] = result.depth;
  return out;
}

py::object fetch(const py::handle& master, bool moved) {
  auto [session, weight] = Session::serving(THPVariable_Unpack(master.ptr()), moved);
  if (session && session->note_graph_fetch(*weight))  // there may be a new plan
    std::tie(session, weight) = Session::serving(THPVariable_Unpack(master.ptr()), moved);
  if (!session) return py::none();
  if (Session::sliced(*weight)) return session->fetch_whole(py::reinterpret_borrow<py::object>(master));
  const InsideCall compiled(nullptr);  // a graph has no call whose beginning would be known
  return py::reinterpret_steal<py::object>(
      session->access(*weight, master.ptr(), /*training=*/false, /*inside=*/true));
}

/// The record of a tensor that was handed out, or of a view of one; null for any other.
HandedOut* record_shown_by(const py::handle& tensor) {
  return HandedOut::of(*THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl());
}

c10::intrusive_ptr<c10::StorageImpl> storage_of(const py::handle& tensor) {
  const c10::Storage& storage = THPVariable_Unpack(tensor.ptr()).storage();
  return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl());
}

py::object note_untracked_alias(const py::handle& tensor, const py::handle& alias) {
  HandedOut* const record = record_shown_by(tensor);
  if (record == nullptr) return py::none();
  record->note_version_of_alias(THPVariable_Unpack(alias.ptr()).unsafeGetTensorImpl()->version_counter());
  record->note_untracked_alias();
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(storage_of(tensor));
  return py::cpp_function([storage] {
    const auto alive = storage.lock();
    if (alive && HandedOut::of(*alive)->bumped()) write_back_living(alive);
  });
}

/// A tensor that dies on any thread may be the last that has its session.
std::shared_ptr<Session> ends_with_the_gil(std::unique_ptr<Session> session) {
  return {session.release(), [](Session* last) {
            if (PyGILState_Check() != 0) {  // as nearly always, and while the interpreter ends
              delete last;
            } else if (Py_IsInitialized() != 0) {
              const py::gil_scoped_acquire gil;
              delete last;
            }
          }};
}

bool take_to_master(const py::handle& tensor) {
  HandedOut* const record = record_shown_by(tensor);
  if (record == nullptr) return false;
  if (!record->bumped()) return true;
  const std::shared_ptr<Session> session = session_of(*record);
  write_back_living(storage_of(tensor));
  if (session != nullptr) session->tell_lost();
  return true;
}

py::capsule limit_host_memory(std::size_t beside_masters, bool stages, std::size_t locked, std::size_t copies,
                              std::size_t page_cache) {
  using Limit = std::shared_ptr<const void>;
  auto limit =
      std::make_unique<Limit>(HostMemory::limit({.beside_masters = beside_masters,
                                                 .staging = stages ? kStagingBytes * kStagingBuffers : 0,
                                                 .locked = locked,
                                                 .copies = copies,
                                                 .page_cache = page_cache}));
  py::capsule held(limit.get(), [](void* ended) { delete static_cast<Limit*>(ended); });
  (void)limit.release();
  return held;
}

py::dict host_memory() {
  const auto used = HostMemory::used();
  py::dict found;
  for (const auto& [name, use] :
       {std::pair("locked", HostUse::locked), std::pair("copies", HostUse::copies),
        std::pair("staging", HostUse::staging), std::pair("page_cache", HostUse::page_cache),
        std::pair("activations", HostUse::activations)})
    found[name] = used[static_cast<std::size_t>(use)];
  return found;
}

}  // namespace

}  // namespace dynswap

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace dynswap;
  m.doc() = "The native provider of dynswap_ext.";
  serve_interpreter();
  translate_errors();
  define_module_state();
  define_attribute(m);
  define_lossless(m);

  py::class_<OffloadingScope>(m, "OffloadingScope", "Code whose saved tensors leave the device.")
      .def("end", &OffloadingScope::end);
  py::class_<Session, std::shared_ptr<Session>>(m, "Session",
                                                "One install: a model's weights and their engine.")
      .def(py::init([](const py::object& options, const py::object& budget, const py::object& hooks,
                       const std::string& backend) {
             return ends_with_the_gil(
                 std::make_unique<Session>(SessionOptions(options), Budget(budget), Hooks(hooks), backend));
           }),
           py::arg("options"), py::arg("budget"), py::arg("hooks"), py::arg("backend"))
      .def_property_readonly("provider", [](const Session&) { return "native"; })
      .def_property_readonly("backend", &Session::backend)
      .def(
          "draft",
          [](Session& session, const py::object& root, const py::object& swap_class, const py::object& plan) {
            const auto saved = plan.is_none() ? std::nullopt : std::optional<SavedPlan>(plan);
            return session.draft(root, serving_calls(swap_class), saved);
          },
          py::arg("root"), py::arg("swap_class"), py::arg("plan") = py::none())
      .def("begin", [](const py::object& self) { self.cast<Session&>().begin(self); })
      .def(
          "attach",
          [](const py::object& self, const py::object& root, const py::object& swap_class) {
            return self.cast<Session&>().attach(self, root, serving_calls(swap_class));
          },
          py::arg("root"), py::arg("swap_class"))
      .def("detach", &Session::detach, py::arg("root"))
      .def("adopt", &Session::adopt, py::arg("module"), py::arg("name"))
      .def("release_memory", &Session::release_memory, py::arg("root"))
      .def("bring_residents", &Session::bring_residents)
      .def(
          "replan",
          [](Session& session, const py::object& root, const py::object& budget) {
            session.replan(root, Budget(budget));
          },
          py::arg("root"), py::arg("budget"))
      .def_property_readonly("outdated", &Session::outdated)
      .def_property_readonly("given_way_bytes", &Session::given_way_bytes)
      .def_property_readonly("captured", &Session::captured)
      .def_property_readonly("modules", &Session::modules)
      .def_property_readonly("device", &Session::device)
      .def_property_readonly("dtype", &Session::dtype)
      .def("keep_dtype", &Session::keep_dtype, py::arg("module"), py::arg("name"))
      .def("dtype_of", &Session::dtype_of, py::arg("module"), py::arg("name"))
      .def("flush", &Session::flush)
      .def("flush_module", &Session::flush_module, py::arg("module"))
      .def("release", &Session::release, py::arg("module"))
      .def("expect_writes", &Session::expect_writes, py::arg("masters"))
      .def("note_writes", &Session::note_writes, py::arg("masters"))
      .def_property_readonly("sampled_bytes", &Session::sampled_bytes)
      .def("check", &Session::check, py::arg("module"))
      .def_static("inside_call", &inside_call)
      .def("enclose",
           [](const std::shared_ptr<Session>& session) { return std::make_unique<OffloadingScope>(session); })
      .def("stats", [](const Session& session) { return as_dict(session.stats()); })
      .def("reset_stats", &Session::reset_stats)
      .def("groups", &Session::groups)
      .def("shared_out", &Session::shared_out)
      .def("services", &Session::services, py::arg("module"))
      .def("fetch_buffer", &Session::fetch_buffer, py::arg("module"), py::arg("name"))
      .def("fetch_slice", &Session::fetch_slice, py::arg("master"), py::arg("index"))
      .def("fetch_whole", &Session::fetch_whole, py::arg("master"))
      .def("expect_slices", &Session::expect_slices, py::arg("master"), py::arg("indices"))
      .def("guess_slices", &Session::guess_slices, py::arg("master"), py::arg("indices"))
      .def("fetch_for_guess", &Session::fetch_for_guess, py::arg("master"))
      .def("record", &Session::record, py::arg("on"))
      .def("timeline", &Session::timeline)
      .def("note_pass", &Session::note_pass)
      .def("saved_plan", &Session::saved_plan)
      .def(
          "retune",
          [](Session& session, const py::object& root, const py::object& budget) {
            return session.retune(root, Budget(budget));
          },
          py::arg("root"), py::arg("budget"))
      .def("close", &Session::close);

  m.def(
      "fetch", &fetch, py::arg("master"), py::arg("moved") = false,
      "What a forward gets for a master, which may have `moved` to other memory; None if no install of this "
      "process serves it.");
  m.def("copied", &copied_by_torch, py::arg("master"), py::arg("device"), py::arg("dtype"),
        py::arg("copy") = true,
        "A copy of a master on a device, made by torch. What is page-locked of it stays so until then.");
  m.def("note_untracked_alias", &note_untracked_alias, py::arg("tensor"), py::arg("alias"),
        "Notes that `.data` of a handed-out tensor was taken outside a forward: an alias with a version "
        "counter of its own. From now on that counter and the tensor's bytes tell whether it was written. "
        "Returns a function that takes such writes to the master, to be called once the alias is gone; None "
        "for any other tensor.");
  m.def("take_to_master", &take_to_master, py::arg("tensor"),
        "Takes what was written in place on a handed-out tensor to its master; False for any other tensor.");
  if (!keeps_python_object<torch::autograd::Node>) {
    m.def("release_idle_nodes", &Session::release_idle_nodes_of_all,
          "Lets go of the autograd nodes of weights that no graph has: they keep masters.");
  }
  m.def("limit_host_memory", &limit_host_memory, py::arg("beside_masters") = SIZE_MAX, py::kw_only(),
        py::arg("stages") = false, py::arg("locked") = SIZE_MAX, py::arg("copies") = SIZE_MAX,
        py::arg("page_cache") = SIZE_MAX,
        "Sets limits in bytes (`HostLimits`), which hold for all sessions while the result lives. `stages`: "
        "the device may need staging buffers, for which room is left.");
  m.def(
      "map_shared", &map_shared_tensor, py::arg("descriptor"), py::arg("offset"), py::arg("nbytes"),
      "Maps a range of an open file, from a page's begin on, as a tensor of bytes. What is written there is "
      "read by other processes, and an install may page-lock it. RuntimeError if it cannot be mapped.");
  m.def("host_memory", &host_memory, "The bytes of RAM that all sessions take beside masters, by use.");
  py::dict stats;
  for (const Stat& stat : kStats) stats[stat.name] = stat.kind != Stat::state;
  m.attr("STATS") = stats;  // by name, whether reset_stats() clears it
  m.def("build_info", &build_info, "What the extension was built with and for. Wakes no driver.");
  m.def("cuda_device_count", &device_count, py::call_guard<py::gil_scoped_release>(),
        "How many CUDA devices the native provider can serve. Wakes the driver, so that processes forked "
        "afterwards cannot use CUDA. Raises DeviceError where the CUDA runtime cannot say.");
  m.def("capabilities", &capabilities, py::arg("device"),
        "What torch has for a device: \"obstacle\" (why its streams cannot serve it; empty if they can), and "
        "whether there is a \"copy_stream\", \"pinned_memory\", and \"page_locking\" in place; and "
        "\"free_memory_callback_obstacle\" (why its allocator does not ask for memory before it gives up; "
        "empty if it does). "
        "Wakes its driver.");
  m.def("set_memory_history_recorded", &set_memory_history_recorded, py::arg("recorded"),
        "Sets whether torch records the history of its memory. While it does, residents do not give way.");
  m.def(
      "simulate", &simulate, py::arg("weights"), py::arg("budget"), py::arg("prefetch"), py::arg("bandwidth"),
      py::arg("latency"), py::arg("passes"), py::arg("placement") = "even", py::arg("places") = Places{},
      py::arg("backend") = "cuda", py::arg("at_once") = std::set<std::uint64_t>(),
      py::arg("by_use") = ByUse{}, py::arg("also_in") = AlsoIn{}, py::arg("host") = py::none(),
      py::arg("mesh") = py::none(),
      "Runs the engine on a virtual clock. weights: (name, bytes, compute seconds, unit) in the order of "
      "use; budget in bytes (0: only what prefetch needs); bandwidth in bytes a second; latency in seconds a "
      "copy; placement: residents spread evenly (\"even\"), or by what they save (\"timed\"); places: for "
      "each weight that is mapped from a file (path, offset, whether it is cast), else None; backend: "
      "\"host\", \"cuda\" or \"torch\", as which memory is laid out; at_once: the units that a call needs as "
      "a whole; by_use: the units that are experts, with the part of the experts of a layer that a pass "
      "uses; also_in: by a weight's number, the units of other modules that have it and need it at once; "
      "host: the seconds that the host takes to enqueue a weight's copy, and a module's kernels. It runs "
      "ahead, and waits at the end of each pass (None: it takes no time, and keeps pace with the device); "
      "mesh: the ranks that share out the copies, and the bytes a second at which each receives what the "
      "others have brought (None: each copies all bytes). They need three passes to know the order of use.");
  m.def("smallest_budget", &smallest_budget, py::arg("weights"), py::arg("places") = Places{},
        py::arg("backend") = "host", py::arg("at_once") = std::set<std::uint64_t>(),
        py::arg("by_use") = ByUse{}, py::arg("also_in") = AlsoIn{},
        "The bytes of the smallest budget that works, and the numbers of the weights that need them: the "
        "largest group, and the largest of an expert's. The arguments are those of simulate().");

  // Copies in flight end before the interpreter does; a forked child has no threads to end them.
  py::module_::import("atexit").attr("register")(py::cpp_function(&Session::close_all));
  at_fork(nullptr, nullptr, &Session::abandon_all_after_fork);
}
