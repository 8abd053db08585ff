#include "sim/measure.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/engine.h"
#include "sim/virtual_backend.h"

namespace dynswap::sim {

namespace {

/// Draws experts in place of those that were recorded.
class Routing {
 public:
  explicit Routing(const Groups& groups) : groups_(groups) {}

  bool random() const {
    return std::any_of(groups_.begin(), groups_.end(), std::mem_fn(&GroupTraits::by_use));
  }

  /// The group to use where `group` was.
  std::uint32_t choose(std::uint32_t group) {
    if (!groups_[group].by_use) {
      chosen_.clear();
      return group;
    }
    // A layer may use an expert several times, and then it is one expert.
    const auto known = std::find_if(chosen_.begin(), chosen_.end(),
                                    [&](const auto& choice) { return choice.first == group; });
    if (known != chosen_.end()) return known->second;
    std::uint32_t first = group, last = group + 1;
    while (first > 0 && groups_[first - 1].by_use) --first;
    while (last < groups_.size() && groups_[last].by_use) ++last;
    std::uint32_t drawn = group;
    for (int tries = 0; tries < 8; ++tries) {
      drawn = first + static_cast<std::uint32_t>(random_() % (last - first));
      if (std::none_of(chosen_.begin(), chosen_.end(),
                       [&](const auto& choice) { return choice.second == drawn; }))
        break;
    }
    chosen_.emplace_back(group, drawn);
    return drawn;
  }

 private:
  const Groups& groups_;
  std::mt19937_64 random_{20'26};
  std::vector<std::pair<std::uint32_t, std::uint32_t>> chosen_;  ///< since a group in an order
};

}  // namespace

double measure(const AccessPattern& pattern, const std::vector<bool>& resident, std::size_t cache_bytes,
               std::size_t budget, std::uint32_t prefetch) {
  auto backend = std::make_unique<VirtualBackend>(pattern.bytes_per_second, pattern.latency);
  VirtualBackend& clock = *backend;
  std::unordered_map<const Source*, double> copy_bytes;
  EngineOptions options;
  options.budget = budget;
  options.prefetch = prefetch;
  options.prior.emplace();
  options.prior->resident = resident;
  options.prior->cache_bytes = cache_bytes;
  const std::size_t groups = pattern.groups.size();
  options.prior->group_of.resize(groups);
  std::iota(options.prior->group_of.begin(), options.prior->group_of.end(), 0u);
  const auto engine = std::make_shared<Engine>(std::move(backend), options);
  for (std::size_t i = 0; i < groups; ++i) {
    auto source = std::make_shared<Source>();
    source->count = pattern.groups[i].bytes;
    if (!pattern.copy_bytes.empty()) copy_bytes[source.get()] = pattern.copy_bytes[i];
    engine->add_weight(std::move(source), i, {.by_use = pattern.groups[i].by_use});
  }
  try {
    engine->plan();
  } catch (const BudgetError&) {
    return std::numeric_limits<double>::infinity();
  }
  if (!copy_bytes.empty()) {
    clock.set_copy_bytes([&](const Piece& piece) {
      const double share = static_cast<double>(piece.count) / static_cast<double>(piece.source->count);
      return share * copy_bytes.at(piece.source.get());
    });
  }
  double begin = 0;
  Routing routing(pattern.groups);
  // A cache takes longer to fill, and which experts come is chance.
  const int warm_up = routing.random() ? 12 : kWarmUpRounds;
  const int measured = routing.random() ? 8 : kMeasuredRounds;
  for (int round = 0; round < warm_up + measured; ++round) {
    if (round == warm_up) begin = clock.seconds();
    std::vector<Lease> leases;
    for (const Step& step : pattern.steps) {
      leases.push_back(engine->acquire(routing.choose(step.group), kConsumer));
      clock.kernel(step.compute_seconds);
      if (step.lets_go) leases.clear();
    }
  }
  return (clock.seconds() - begin) / measured;
}

}  // namespace dynswap::sim
