// What a session is given of the Python front end. It imports nothing of it.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace dynswap {

/// The fields of `Hooks` in dynswap_ext/_swap/protocol.py, which says what each is for.
/// LOCK: the GIL guards it.
struct Hooks {
  explicit Hooks(const py::handle& given)
      : warn(given.attr("warn")),
        replan(given.attr("replan")),
        call_begins(given.attr("call_begins")),
        call_failed(given.attr("call_failed")),
        units(given.attr("units")),
        proxy_for(given.attr("proxy_for")),
        proxy_class(given.attr("proxy_class")),
        inner_names(given.attr("inner_names")),
        adds_attributes_only(given.attr("adds_attributes_only")),
        rebuild_wrapper(given.attr("rebuild_wrapper")),
        with_class_of(given.attr("with_class_of")),
        flatten_wrapper(given.attr("flatten_wrapper")) {}

  py::object warn;
  py::object replan, call_begins, call_failed;
  py::object units;
  py::object proxy_for, proxy_class;
  py::object inner_names, adds_attributes_only, rebuild_wrapper, with_class_of, flatten_wrapper;
};

}  // namespace dynswap
