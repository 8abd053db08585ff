// What a session is given of the Python front end. It imports nothing of it.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace dynswap {

/// The fields of `Hooks` in dynswap_ext/_swap/protocol.py, which says what each is for.
/// LOCK: the GIL guards it.
struct Hooks {
  explicit Hooks(const py::handle& given)
      : warn(given.attr("warn")),
        warn_lost(given.attr("warn_lost")),
        call_begins(given.attr("call_begins")),
        call_failed(given.attr("call_failed")),
        plan_request(given.attr("plan_request")),
        slices_of(given.attr("slices_of")),
        convert(given.attr("convert")),
        masters(given.attr("masters")),
        give_data(given.attr("give_data")),
        proxy_class(given.attr("proxy_class")),
        inner_names_or_streams(given.attr("inner_names_or_streams")),
        rebuild_subclass(given.attr("rebuild_subclass")) {}

  py::object warn, warn_lost;
  py::object call_begins, call_failed, plan_request;
  py::object slices_of, convert, masters, give_data;
  py::object proxy_class;
  py::object inner_names_or_streams, rebuild_subclass;
};

}  // namespace dynswap
