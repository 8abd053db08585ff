// Layout: which weights travel together, and where they lie in a group.
#include <algorithm>
#include <utility>

#include "core/align.h"
#include "core/check.h"
#include "core/layout.h"

namespace dynswap {

namespace {

constexpr std::size_t kFewestGroups = 16;  ///< about so many, however small the model

/// Note [Tiny weights stay]: norms are often defined behind the large weights that they are used before. Were
/// they to travel with their neighbours by definition, those would be needed twice a pass, and often copied
/// twice. A unit is tiny if it has at most this part of a usual group's bytes, however small the groups are
/// that a plan forms. Tiny units stay if all of them have at most 1 / kTinyPartOfModel of the model's bytes.
constexpr std::size_t kTinyPart = 32;

}  // namespace

Layout::Grouping Layout::grouping(const Units& units, unsigned halvings) const {
  std::size_t total = 0;
  for (const Weight& weight : weights_) total += weight.options.by_use ? 0 : weight.source->wanted_bytes();
  // A small model is streamed all the same: then less is enough.
  const std::size_t enough = std::min(options_.group_bytes, total / kFewestGroups);
  Grouping grouping{enough >> halvings, std::min(options_.split_bytes, total) >> halvings, 0};
  const std::size_t tiny = enough / kTinyPart;
  const std::size_t alignment = traits_.weight_alignment;
  std::size_t tiny_total = 0;
  for (const std::vector<WeightId>& unit : units) {
    const WeightOptions& options = weights_[unit.front()].options;
    if (bytes_of(unit) > tiny || options.keep || options.by_use) continue;
    for (const WeightId id : unit) tiny_total += align_up(weights_[id].source->wanted_bytes(), alignment);
  }
  if (tiny_total <= total / kTinyPartOfModel) grouping.tiny = tiny;
  return grouping;
}

void Layout::form_groups(Units units, const Grouping& grouping,
                         const std::vector<std::vector<WeightId>>& on_device) {
  // A unit's weights are used together, so a group holds whole units: small ones until there is enough
  // to be worth a transfer. Only a unit too large to travel at once is cut, and its small weights (a
  // bias) go with the weight before them. A unit that one call needs as a whole is one group, whatever its
  // size: cut, it could be given a budget that does not hold it. So is an expert. Around residents that are
  // there already, a group goes on.
  const auto [enough, too_large, tiny] = grouping;
  std::size_t largest = 0;
  for (const Weight& weight : weights_)
    largest = std::max<std::size_t>(largest, weight.options.by_use ? 0 : weight.source->wanted_bytes());
  const std::size_t small = std::max(enough / 4, largest / 16);
  groups_.clear();
  std::vector<bool> grouped(weights_.size(), false), in_tiny_unit(weights_.size(), false);
  for (const std::vector<WeightId>& group : on_device) {
    for (const WeightId id : group) grouped[id] = true;
  }
  std::size_t open_bytes = 0;
  bool open = false;
  std::size_t current = 0;  // the group that is open
  const auto append = [&](WeightId weight) {
    if (!open) {
      current = groups_.size();
      groups_.emplace_back().keep = weights_[weight].options.keep;
      open_bytes = 0;
      open = true;
    }
    groups_[current].weights.push_back(weight);
    open_bytes += weights_[weight].source->wanted_bytes();
  };
  std::optional<std::size_t> tinies;
  for (std::vector<WeightId>& unit : units) {
    const std::size_t bytes_of_unit = bytes_of(unit);
    const WeightOptions& options = weights_[unit.front()].options;
    if (options.by_use) {
      groups_.emplace_back().weights = std::move(unit);
      continue;
    }
    if (bytes_of_unit <= tiny && !options.keep) {
      for (const WeightId weight : unit) {
        in_tiny_unit[weight] = true;
        if (grouped[weight]) continue;
        if (!tinies) {
          tinies = groups_.size();
          groups_.emplace_back().tiny = true;
        }
        groups_[*tinies].weights.push_back(weight);
      }
      continue;
    }
    std::erase_if(unit, [&grouped](WeightId weight) { return grouped[weight]; });
    if (unit.empty()) continue;
    if (open) {
      const WeightOptions& before = weights_[groups_[current].weights.back()].options;
      open = before.model == options.model && before.keep == options.keep;
    }
    const bool cut = bytes_of_unit > too_large && !options.at_once;
    for (const WeightId weight : unit) {
      const std::size_t bytes = weights_[weight].source->wanted_bytes();
      if (cut && open_bytes >= enough && bytes > small) open = false;
      append(weight);
    }
    if (open_bytes >= enough) open = false;
  }
  for (const std::vector<WeightId>& group : on_device) {
    Group& made = groups_.emplace_back();
    made.weights = group;
    made.on_device = true;
    made.keep = weights_[group.front()].options.keep;
    made.tiny = std::all_of(group.begin(), group.end(), [&](WeightId id) { return in_tiny_unit[id]; });
  }
  // Numbered in the order of their weights.
  for (Group& group : groups_) std::sort(group.weights.begin(), group.weights.end());
  std::stable_sort(groups_.begin(), groups_.end(),
                   [](const Group& a, const Group& b) { return a.weights.front() < b.weights.front(); });
  lay_out_groups();
}

void Layout::take_groups(const PriorPlan& prior) {
  DYNSWAP_CHECK(prior.group_of.size() == weights_.size(), "the plan was made for other weights");
  groups_.clear();
  for (WeightId weight = 0; weight < weights_.size(); ++weight) {
    const GroupId id = prior.group_of[weight];
    DYNSWAP_CHECK(id <= groups_.size(), "groups are numbered in order");
    if (id == groups_.size()) groups_.emplace_back();
    groups_[id].weights.push_back(weight);
    groups_[id].keep = weights_[weight].options.keep;
  }
  DYNSWAP_CHECK(prior.resident.size() == groups_.size(), "the plan was made for other groups");
  lay_out_groups();
}

void Layout::lay_out_groups() {
  std::size_t weights = 0;
  for (const Group& group : groups_) weights += group.weights.size();
  DYNSWAP_CHECK(weights == weights_.size(), "each weight is in one group");
  for (GroupId id = 0; id < groups_.size(); ++id) {
    for (std::size_t part = 0; part < groups_[id].weights.size(); ++part) {
      weights_[groups_[id].weights[part]].group = id;
      weights_[groups_[id].weights[part]].part = part;
    }
    groups_[id].bytes = lay_out(groups_[id]);
    groups_[id].by_use = weights_[groups_[id].weights.front()].options.by_use;
  }
}

/// Weights of one file that come one after the other lie as they do in the file: see Note [Neighbours are
/// read together]. Those of this rank alone come last.
std::vector<WeightId> Layout::in_file_order(std::vector<WeightId> ids) const {
  const auto of_this_rank = [this](WeightId id) { return weights_[id].options.of_this_rank; };
  std::stable_partition(ids.begin(), ids.end(), [&](WeightId id) { return !of_this_rank(id); });
  const auto kind = [&](WeightId id) { return std::pair(weights_[id].source->file.get(), of_this_rank(id)); };
  for (auto first = ids.begin(), last = first; first != ids.end(); first = last) {
    last = std::find_if(first, ids.end(), [&](WeightId id) { return kind(id) != kind(*first); });
    std::stable_sort(first, last, [this](WeightId a, WeightId b) {
      return weights_[a].source->offset < weights_[b].source->offset;
    });
  }
  return ids;
}

std::size_t Layout::lay_out(const Group& group) {
  const std::size_t alignment = traits_.alignment;
  std::size_t end = 0;
  for (const WeightId id : in_file_order(group.weights)) {
    Weight& weight = weights_[id];
    std::size_t offset = align_up(end, traits_.weight_alignment);
    if (const auto phase = traits_.phase(*weight.source)) {
      offset += (alignment + *phase - offset % alignment) % alignment;
    }
    weight.offset = offset;
    end = offset + weight.source->wanted_bytes();
  }
  return std::max(align_up(end, alignment), alignment);
}

}  // namespace dynswap
