// Which weights travel together, where each lies in its group, and which groups stay on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/engine_options.h"
#include "core/residency.h"
#include "core/source.h"

namespace dynswap {

/// Forms the groups of a plan, and chooses its residents. Arithmetic alone: of the device it takes the
/// traits, it needs no lock, and the same weights always give the same plan.
class Layout {
 public:
  struct Weight {
    SourcePtr source;
    std::uint64_t unit = 0;
    WeightOptions options;
    bool shared = false;  ///< by so many modules that it is kept
    GroupId group = 0;
    std::size_t offset = 0;  ///< in the group's copy
    std::size_t part = 0;    ///< of the group's copy
  };

  struct Group : GroupTraits {
    std::vector<WeightId> weights;
  };

  /// `options` has to outlive the layout.
  Layout(const EngineOptions& options, const DeviceTraits& traits) : options_(options), traits_(traits) {}

  // layout_units.cpp: as the engine has them.
  WeightId add_weight(SourcePtr source, std::uint64_t unit, WeightOptions options);
  void share_weight(WeightId weight, std::uint64_t unit, WeightOptions options);

  /// Whether the budget holds all weights, in the usual groups.
  bool holds_all();
  /// Forms groups and chooses residents; once. Throws BudgetError, naming the smallest budget that works.
  /// `on_device`: see Engine::arrange().
  void arrange(const std::vector<std::vector<WeightId>>& on_device);

  std::vector<Weight>& weights() noexcept { return weights_; }
  std::vector<Group>& groups() noexcept { return groups_; }
  ResidencyPlan& residency() noexcept { return residency_; }
  Groups group_traits() const { return {groups_.begin(), groups_.end()}; }
  std::size_t group_bytes() const noexcept;  ///< of all groups

 private:
  /// The weights of each unit, in the order of their first weights.
  using Units = std::vector<std::vector<WeightId>>;

  /// How weights are put together, in bytes.
  struct Grouping {
    std::size_t enough;     ///< a group of this size takes no further unit
    std::size_t too_large;  ///< a unit of more is cut between its weights, if they are not needed at once
    std::size_t tiny;       ///< units of no more stay on the device, together; 0: none do
  };

  struct Cost {
    std::size_t bytes = 0;
    std::size_t overhead = 0;  ///< of the copies, in bytes that could be copied meanwhile
  };

  void join_units();
  Units units() const;
  std::size_t bytes_of(const std::vector<WeightId>& unit) const noexcept;

  // layout_groups.cpp
  /// The usual grouping, its groups halved so many times.
  Grouping grouping(const Units& units, unsigned halvings = 0) const;
  /// Those of `on_device` are groups already.
  void form_groups(Units units, const Grouping& grouping,
                   const std::vector<std::vector<WeightId>>& on_device);
  void take_groups(const PriorPlan& prior);
  void lay_out_groups();
  std::vector<WeightId> in_file_order(std::vector<WeightId> ids) const;
  std::size_t lay_out(const Group& group);

  // layout.cpp
  std::vector<std::vector<WeightId>> groups_to_keep(std::vector<std::vector<WeightId>> on_device) const;
  void form_groups_within(std::size_t budget, const std::vector<std::vector<WeightId>>& on_device);
  void form_groups_and_residents(const std::vector<std::vector<WeightId>>& on_device, std::size_t budget);
  Cost cost_of_pass() const;
  void check_kept(std::size_t budget) const;

  const EngineOptions& options_;
  const DeviceTraits traits_;
  std::vector<Weight> weights_;
  std::vector<std::pair<WeightId, std::uint64_t>> shared_;  ///< each with another unit that has it
  std::vector<Group> groups_;
  ResidencyPlan residency_;
};

}  // namespace dynswap
