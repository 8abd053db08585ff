// What torch's Python for a device (torch.cuda, or torch.pretend) asks of it, and what tests ask of the
// machine.
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include "machine.h"
#include "torch_device.h"

namespace pretend {

void register_composites();
void define_cuda(pybind11::module_& m);
void add_collectives(pybind11::module_& m);

namespace {

namespace py = pybind11;

py::tuple data_of(const c10::Stream& stream) {
  return py::make_tuple(stream.id(), static_cast<int>(stream.device_index()), static_cast<int>(kType));
}

py::dict as_dict(const c10::CachingAllocator::Stat& stat) {
  py::dict dict;
  dict["current"] = stat.current;
  dict["peak"] = stat.peak;
  dict["allocated"] = stat.allocated;
  dict["freed"] = stat.freed;
  return dict;
}

py::dict memory_stats(int device) {
  const auto stats = allocator().getDeviceStats(static_cast<c10::DeviceIndex>(device));
  py::dict result;
  const auto add = [&](const char* name, const c10::CachingAllocator::StatArray& array) {
    py::dict kinds;
    kinds["all"] = as_dict(array[0]);
    result[name] = kinds;
  };
  add("allocation", stats.allocation);
  add("active", stats.active);
  add("segment", stats.segment);
  add("allocated_bytes", stats.allocated_bytes);
  add("reserved_bytes", stats.reserved_bytes);
  add("active_bytes", stats.active_bytes);
  add("requested_bytes", stats.requested_bytes);
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  return result;
}

py::dict counts_now() {
  const Counts now = counts();
  py::dict dict;
  dict["copies"] = now.copies;
  dict["copied_bytes"] = now.copied_bytes;
  dict["pageable_copies"] = now.pageable_copies;
  dict["batches"] = now.batches;
  dict["kernels"] = now.kernels;
  dict["host_functions"] = now.host_functions;
  dict["synchronisations"] = now.synchronisations;
  dict["registered_bytes"] = now.registered_bytes;
  dict["streams"] = now.streams;
  dict["events"] = now.events;
  dict["contexts"] = now.contexts;
  dict["longest_queue"] = now.longest_queue;
  return dict;
}

Order order_of(const std::string& name) {
  if (name == "late") return Order::late;
  if (name == "early") return Order::early;
  TORCH_CHECK(name == "mixed", "order is 'late', 'early' or 'mixed'");
  return Order::mixed;
}

PYBIND11_MODULE(_pretend, m) {
  const auto without_gil = py::call_guard<py::gil_scoped_release>();

  // As torch._C names them, with "_cuda_" before.
  m.def("getDeviceCount", [] { return faults().no_devices ? 0 : kDevices; });
  m.def("getDevice", [] { return current_device(); });
  m.def("setDevice", [](int device) {
    TORCH_CHECK(device < kDevices, c10::DeviceTypeName(kType), " error: invalid device ordinal");
    if (device >= 0) set_device(device);
  });
  const auto exchange = [](int device) {
    const int before = current_device();
    if (device >= 0) set_device(device);
    return before;
  };
  m.def("exchangeDevice", exchange);
  m.def("maybeExchangeDevice", exchange);
  m.def("getCurrentStream", [](int device) { return data_of(as_torch(current_stream(device))); });
  m.def("getDefaultStream", [](int device) { return data_of(as_torch(default_stream(device))); });
  m.def("getCurrentRawStream", [](int device) { return as_torch(current_stream(device)).id(); });
  m.def(
      "setStream",
      [](std::int64_t stream_id, int device_index, int) {
        const c10::Stream stream(c10::Stream::UNSAFE, device_at(device_index), stream_id);
        set_device(device_index);
        c10::impl::VirtualGuardImpl(kType).exchangeStream(stream);
      },
      py::arg("stream_id"), py::arg("device_index"), py::arg("device_type") = static_cast<int>(kType));
  m.def(
      "synchronize", [] { checked([] { synchronise_device(current_device(), "synchronize"); }); },
      without_gil);
  m.def("memoryStats", &memory_stats);
  m.def("resetPeakMemoryStats",
        [](int device) { allocator().resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("resetAccumulatedMemoryStats",
        [](int device) { allocator().resetAccumulatedStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("emptyCache", [] { allocator().emptyCache(); }, without_gil);
  m.def("setMemoryFraction", [](double fraction, int device) {
    allocator().set_cap(device,
                        static_cast<std::size_t>(fraction * static_cast<double>(allocator().total(device))));
  });
  m.def("getMemoryFraction", [](int device) {
    return static_cast<double>(allocator().cap(device)) / static_cast<double>(allocator().total(device));
  });
  m.def("cudaCachingAllocator_enable", [](bool enabled) { allocator().caching_enabled() = enabled; });
  m.def("cudaCachingAllocator_is_enabled", [] { return allocator().caching_enabled(); });
  m.def("set_sync_debug_mode", [](int mode) { sync_debug_mode() = mode; });
  m.def("get_sync_debug_mode", [] { return sync_debug_mode(); });
  m.def("sleep", [](std::int64_t cycles) {
    // At 2 GHz, at most half a second.
    const auto time = std::chrono::nanoseconds(std::min<std::int64_t>(cycles / 2, 500'000'000));
    enqueue_delay(current_stream(current_device()), time);
  });

  m.def("new_stream", [](int priority) { return data_of(stream_from_pool(current_device(), priority)); });
  m.def("elapsed_time", [](std::intptr_t from, std::intptr_t to) {
    const c10::impl::VirtualGuardImpl guard(kType);
    return guard.elapsedTime(reinterpret_cast<void*>(from), reinterpret_cast<void*>(to), 0);
  });
  m.def("priority_of", [](std::int64_t id) {
    return id == 0 ? 0 : priority_of(*reinterpret_cast<Stream*>(static_cast<std::intptr_t>(id)));
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("memory_info", [](int device) {
    const auto [free, total] = allocator().getMemoryInfo(static_cast<c10::DeviceIndex>(device));
    const std::size_t used = total - free;
    return std::make_pair(std::max(allocator().cap(device), used) - used, total);
  });
  m.def("set_virtual_clock", &set_virtual_clock);
  m.def("drop_work", &drop_work);
  if constexpr (kType == c10::DeviceType::CUDA) define_cuda(m);

  add_collectives(m);

  // Before, torch takes no memory for pinned.
  m.def("init", [] { at::globalContext().lazyInitDevice(kType); });

  // The tests' own.
  m.def("register_composites", &register_composites);
  m.def(
      "reset", [](std::uint64_t seed, const std::string& order) { reset(seed, order_of(order)); },
      py::arg("seed"), py::arg("order"), without_gil);
  m.def("counts", &counts_now);
  m.def("violations", &violations);
  m.def("sticky_error", &sticky_error);
  m.def("forbid_synchronisation", &forbid_synchronisation);
  m.def("watch_pages", &watch_pages);
  m.def("is_pinned", [](std::uintptr_t address, std::size_t bytes) {
    return pinned(reinterpret_cast<void*>(address), bytes) == Pinned::whole;
  });
  py::class_<Faults>(m, "Faults")
      .def_readwrite("no_batches", &Faults::no_batches)
      .def_readwrite("no_devices", &Faults::no_devices)
      .def_readwrite("device_count_error", &Faults::device_count_error)
      .def_readwrite("driver_version", &Faults::driver_version)
      .def_readwrite("register_at_most", &Faults::register_at_most)
      .def_readwrite("locked_at_most", &Faults::locked_at_most)
      .def_readwrite("query_error", &Faults::query_error)
      .def_readwrite("kernel_error", &Faults::kernel_error)
      .def_readwrite("registration_ms", &Faults::registration_ms)
      .def_readwrite("memory_bytes", &Faults::memory_bytes)
      .def_readwrite("taken_by_others", &Faults::taken_by_others)
      .def_readwrite("integrated", &Faults::integrated)
      .def_readwrite("segment_bytes", &Faults::segment_bytes)
      .def_readwrite("unpinning_waits", &Faults::unpinning_waits)
      .def_readwrite("no_priorities", &Faults::no_priorities)
      .def_readwrite("no_pinned_memory", &Faults::no_pinned_memory)
      .def_readwrite("one_stream", &Faults::one_stream)
      .def_readwrite("no_default_stream", &Faults::no_default_stream)
      .def_readwrite("synchronous_copies", &Faults::synchronous_copies);
  m.def("faults", &faults, py::return_value_policy::reference);
  // For the self-test: what a broken engine would do.
  m.def("hidden", [](std::uintptr_t address) {
    return reinterpret_cast<std::uintptr_t>(hidden(reinterpret_cast<void*>(address)));
  });
}

}  // namespace
}  // namespace pretend
