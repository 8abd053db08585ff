// One install: the weights of one model, and the engine that streams them.
#pragma once

#include <torch/extension.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "bindings/weight.h"
#include "core/engine.h"

namespace dynswap {

struct SessionOptions {
  std::uint32_t prefetch = 2;
  std::optional<std::size_t> budget;  ///< bytes
  bool strict_budget = false;
  std::optional<bool> pin;  ///< nothing: pin what can be pinned
  std::string backend = "auto";
};

/// LOCK: the GIL guards it. The engine has locks of its own.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(const at::Device& device, std::optional<at::ScalarType> dtype, SessionOptions options,
          py::object warn);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // attach.cpp. `self` is this session as Python sees it.
  std::size_t attach(const py::object& self, const py::object& root, const py::object& swap_class);
  void detach(const py::object& root);
  void adopt(const py::object& module, const py::object& name);

  /// The weight of a master that the module has come to hold since the install.
  Weight& late_weight(PyObject* master, PyObject* name, bool parameter);

  /// What an access to the weight hands out. `master` is what the module holds under the name now; a new
  /// reference. Throws the engine's errors and py::error_already_set.
  PyObject* access(Weight& weight, PyObject* master, bool training);

  /// The same, where nothing has changed since the last time; null if something may have.
  PyObject* access_unchanged(Weight& weight, PyObject* master) noexcept;

  /// Takes what was written on handed-out tensors to their masters.
  void flush();
  Stats stats() const;
  void reset_stats();
  void close();

  const std::string& backend() const noexcept { return backend_; }
  const at::Device& device() const noexcept { return device_; }

  void module_attached() noexcept { ++modules_; }
  void module_gone();

  static void close_all();               ///< at interpreter exit
  static void abandon_all_after_fork();  ///< in the child

 private:
  struct Attaching;  // attach.cpp

  void plan(const std::vector<std::pair<Weight*, std::uint64_t>>& streamed);
  Weight& weight_of(PyObject* master, const std::string& name, bool parameter, const Mappings& mappings);
  void restore(PyObject* module);
  void classify(Weight& weight, PyObject* master, const Mappings& mappings);
  void master_changed(Weight& weight, PyObject* master);
  void refetch(Weight& weight);
  void forget_group(Weight& weight);
  void look_for_silent_writes();
  void write_back(Weight& weight);
  PyObject* hand_out(Weight& weight, const at::Tensor& master);
  static PyObject* wrap(const Weight& weight, const at::Tensor& tensor);
  PyObject* convert(const Weight& weight, PyObject* master) const;
  c10::StreamId stream_id() const;

  const at::Device device_;
  const std::optional<at::ScalarType> dtype_;
  const SessionOptions options_;
  const py::object warn_;
  std::string backend_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<void> pinned_;  ///< keeps the masters page-locked
  std::vector<std::unique_ptr<Weight>> weights_;
  std::unordered_map<const c10::TensorImpl*, Weight*>
      by_master_;               ///< for ties; valid during attach and adopt
  std::vector<Weight*> by_id_;  ///< by the engine's WeightId
  std::size_t modules_ = 0;
  bool closed_ = false;
  bool abandoned_ = false;

  /// A pass begins when this weight is used after another one: then residents are looked at for writes
  /// that bump no version.
  const Weight* anchor_ = nullptr;
  const Weight* last_ = nullptr;
};

}  // namespace dynswap
