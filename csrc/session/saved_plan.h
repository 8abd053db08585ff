// A plan that outlives the process: what is saved of it, and whether it applies.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/engine_options.h"
#include "session/weight_table.h"

namespace dynswap {

/// A plan, with the weights that it was made for, as dynswap_ext/_saved_plan.py keeps it in a file.
class SavedPlan {
 public:
  /// Throws py::value_error if `given` is damaged.
  explicit SavedPlan(const py::handle& given);
  SavedPlan(const WeightTable::Streamed& streamed, PriorPlan plan);

  py::dict as_dict() const;
  /// What is another weight in `streamed`, in words; empty if the plan applies.
  std::string difference_from(const WeightTable::Streamed& streamed) const;
  const PriorPlan& plan() const noexcept { return plan_; }

 private:
  /// The name of a weight, and its bytes in the master and on the device.
  using Saved = std::tuple<std::string, std::uint64_t, std::uint64_t>;
  static Saved saved(const Weight& weight);

  std::vector<Saved> weights_;
  PriorPlan plan_;
};

}  // namespace dynswap
