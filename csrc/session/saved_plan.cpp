#include "session/saved_plan.h"

#include <algorithm>
#include <utility>

#include "core/amount.h"

namespace dynswap {

namespace {

std::string described(const std::tuple<std::string, std::uint64_t, std::uint64_t>& weight) {
  const auto& [name, stored, wanted] = weight;
  return name + " (" + amount(stored) + ", on the device " + amount(wanted) + ")";
}

}  // namespace

SavedPlan::Saved SavedPlan::saved(const Weight& weight) {
  return {weight.name, weight.source->stored_bytes(), weight.source->wanted_bytes()};
}

SavedPlan::SavedPlan(const WeightTable::Streamed& streamed, PriorPlan plan) : plan_(std::move(plan)) {
  for (const auto& [weight, unit] : streamed.first) weights_.push_back(saved(*weight));
}

SavedPlan::SavedPlan(const py::handle& given) {
  try {
    weights_ = given["weights"].cast<std::vector<Saved>>();
    plan_.group_of = given["group_of"].cast<std::vector<GroupId>>();
    plan_.resident = given["resident"].cast<std::vector<bool>>();
    plan_.cache_bytes = given["cache_bytes"].cast<std::size_t>();
    plan_.order = given["order"].cast<std::vector<GroupId>>();
  } catch (const std::exception& error) {
    throw py::value_error(error.what());
  }
  GroupId groups = 0;
  for (const GroupId group : plan_.group_of) {
    if (group > groups) throw py::value_error("groups are not numbered in the order of their weights");
    groups = std::max(groups, group + 1);
  }
  if (plan_.group_of.size() != weights_.size() || plan_.resident.size() != groups)
    throw py::value_error("there is not one group for each weight");
  if (std::any_of(plan_.order.begin(), plan_.order.end(), [&](GroupId group) { return group >= groups; }))
    throw py::value_error("the order of use has groups that there are not");
}

py::dict SavedPlan::as_dict() const {
  py::dict out;
  out["weights"] = weights_;
  out["group_of"] = plan_.group_of;
  out["resident"] = plan_.resident;
  out["cache_bytes"] = plan_.cache_bytes;
  out["order"] = plan_.order;
  return out;
}

std::string SavedPlan::difference_from(const WeightTable::Streamed& streamed) const {
  const std::size_t both = std::min(weights_.size(), streamed.first.size());
  for (std::size_t i = 0; i < both; ++i) {
    const Saved now = saved(*streamed.first[i].first);
    if (now != weights_[i]) return described(now) + " is " + described(weights_[i]) + " in the plan";
  }
  if (weights_.size() == streamed.first.size()) return "";
  if (both < weights_.size()) return described(weights_[both]) + " is in the plan, and not in the model";
  return described(saved(*streamed.first[both].first)) + " is in the model, and not in the plan";
}

}  // namespace dynswap
