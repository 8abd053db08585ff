// Layout: the units of weights, of which a group holds as many as it can, and those that share weights.
//
// Note [Modules that share a weight]
// A call that needs its unit at once may share weights with other modules (a decoder that has a bias of its
// own beside the embedding's matrix). A weight is in one group. So units that share one are joined, and
// travel together. Where many share a weight, that could become the whole model. So if they take more than
// twice what the largest of their calls needs, they stay apart, and what they share is kept on the device.
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "core/layout.h"

namespace dynswap {

WeightId Layout::add_weight(SourcePtr source, std::uint64_t unit, WeightOptions options) {
  if (options.keep) unit = ~unit;  // what is kept of a module is a unit of its own
  weights_.push_back({.source = std::move(source), .unit = unit, .options = options});
  return static_cast<WeightId>(weights_.size() - 1);
}

void Layout::share_weight(WeightId id, std::uint64_t unit, WeightOptions options) {
  Weight& weight = weights_[id];
  // There is room for one of each kind at a time: a group in an order, and one by use.
  if (!options.at_once || weight.options.keep || weight.options.by_use != options.by_use) return;
  if (!std::exchange(weight.options.at_once, true)) weight.unit = unit;
  if (weight.unit != unit) shared_.emplace_back(id, unit);
}

void Layout::join_units() {
  if (shared_.empty()) return;
  std::unordered_map<std::uint64_t, std::uint64_t> joined;  // to the unit that it is a part of
  const auto whole = [&joined](std::uint64_t unit) {
    for (auto at = joined.find(unit); at != joined.end(); at = joined.find(unit)) unit = at->second;
    return unit;
  };
  for (const auto& [id, unit] : shared_) {
    const std::uint64_t first = whole(weights_[id].unit), other = whole(unit);
    if (first != other) joined[other] = first;
  }
  std::unordered_map<std::uint64_t, std::size_t> of_call, of_all;
  for (const Weight& weight : weights_) {
    if (!weight.options.at_once) continue;
    of_call[weight.unit] += weight.source->wanted_bytes();
    of_all[whole(weight.unit)] += weight.source->wanted_bytes();
  }
  for (const auto& [id, unit] : shared_) of_call[unit] += weights_[id].source->wanted_bytes();
  std::unordered_map<std::uint64_t, std::size_t> largest_call;
  for (const auto& [unit, bytes] : of_call) {
    std::size_t& largest = largest_call[whole(unit)];
    largest = std::max(largest, bytes);
  }
  const auto too_many = [&](std::uint64_t unit) { return of_all[unit] > 2 * largest_call[unit]; };
  for (const auto& [id, unit] : shared_) {
    WeightOptions& options = weights_[id].options;
    if (options.keep || !too_many(whole(unit))) continue;
    options.keep = weights_[id].shared = true;
    options.by_use = false;
    weights_[id].unit = ~weights_[id].unit;
  }
  for (Weight& weight : weights_) {
    if (!weight.options.keep && !too_many(whole(weight.unit))) weight.unit = whole(weight.unit);
  }
  shared_.clear();
}

Layout::Units Layout::units() const {
  Units units;
  std::unordered_map<std::uint64_t, std::size_t> place;
  for (WeightId id = 0; id < weights_.size();) {
    const std::uint64_t number = weights_[id].unit;
    WeightId end = id;  // most follow one another
    while (end < weights_.size() && weights_[end].unit == number) ++end;
    const auto [at, is_new] = place.try_emplace(number, units.size());
    if (is_new) units.emplace_back();
    std::vector<WeightId>& unit = units[at->second];
    unit.reserve(unit.size() + (end - id));
    for (; id < end; ++id) unit.push_back(id);
  }
  return units;
}

std::size_t Layout::bytes_of(const std::vector<WeightId>& unit) const noexcept {
  std::size_t bytes = 0;
  for (const WeightId id : unit) bytes += weights_[id].source->wanted_bytes();
  return bytes;
}

}  // namespace dynswap
