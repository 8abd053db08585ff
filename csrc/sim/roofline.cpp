#include "sim/roofline.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "core/check.h"
#include "sim/placement.h"

namespace dynswap::sim {

namespace {

constexpr Stream kConsumer = 0;

/// What has been counted so far; the difference of two is what happened between them.
struct Count {
  Count(const VirtualBackend& clock, const Engine& engine)
      : seconds(clock.seconds()),
        stalled(clock.stalled()),
        bytes(static_cast<double>(clock.bytes_copied())),
        copies(static_cast<double>(clock.copies())),
        misses(static_cast<double>(engine.stats().misses)) {}
  double seconds, stalled, bytes, copies, misses;
};

void run_pass(const Workload& workload, Engine& engine, VirtualBackend& clock) {
  const std::vector<Layer>& layers = workload.layers;
  for (std::size_t first = 0; first < layers.size();) {
    std::vector<Lease> leases;
    double compute = 0;
    const std::uint64_t unit = layers[first].unit;
    for (; first < layers.size() && layers[first].unit == unit; ++first) {
      leases.push_back(engine.acquire(static_cast<WeightId>(first), kConsumer));
      compute += layers[first].compute_seconds;
    }
    clock.kernel(compute);
  }
  clock.wait_for_consumer();
}

/// An engine that is given the workload's weights. They are numbered as the layers are.
std::shared_ptr<Engine> engine_of(const Workload& workload, const EngineOptions& options,
                                  double bytes_per_second, double latency) {
  constexpr std::size_t kNoCap = std::numeric_limits<std::size_t>::max();
  auto clock =
      std::make_unique<VirtualBackend>(bytes_per_second, latency, kNoCap, workload.layout, workload.host);
  auto engine = std::make_shared<Engine>(std::move(clock), options);
  for (const Layer& layer : workload.layers) {
    auto source = std::make_shared<Source>();
    source->name = layer.name;
    source->count = layer.bytes;
    source->stored = layer.cast ? Scalar::f8_e5m2 : source->wanted;
    source->file = layer.file;
    source->offset = layer.offset;
    engine->add_weight(std::move(source), layer.unit, layer.at_once);
  }
  return engine;
}

}  // namespace

LargestGroup largest_group(const Workload& workload) {
  EngineOptions options;
  options.budget = 1;
  const auto engine = engine_of(workload, options, 1, 0);
  LargestGroup found;
  try {
    engine->arrange();
  } catch (const BudgetError& error) {  // no group has so few bytes
    found.bytes = error.smallest_bytes();
  }
  for (Engine::GroupReport& group : engine->groups()) {
    if (group.bytes != found.bytes) continue;
    found.layers.assign(group.weights.begin(), group.weights.end());
    break;
  }
  return found;
}

AccessPattern pattern_of(const Workload& workload, const PriorPlan& groups, double bytes_per_second,
                         double latency) {
  AccessPattern pattern;
  pattern.bytes_per_second = bytes_per_second;
  pattern.latency = latency;
  pattern.bytes.resize(groups.resident.size());
  const std::vector<Layer>& layers = workload.layers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const GroupId group = groups.group_of[i];
    pattern.bytes[group] += layers[i].bytes;
    const bool new_group = i == 0 || group != groups.group_of[i - 1];
    if (new_group) pattern.steps.push_back({group, 0, true});
    pattern.steps.back().compute_seconds += layers[i].compute_seconds;
    if (i > 0 && new_group && layers[i - 1].unit == layers[i].unit) {
      // A module computes when it has all of its groups, and lets them go together.
      Step& before = pattern.steps[pattern.steps.size() - 2];
      pattern.steps.back().compute_seconds += std::exchange(before.compute_seconds, 0);
      before.lets_go = false;
    }
  }
  return pattern;
}

Result simulate(const Workload& workload, const EngineOptions& options, double bytes_per_second,
                double latency, int passes, Residents residents) {
  DYNSWAP_CHECK(passes >= 2, "the first half of the passes is warm-up: give two at least");
  const auto planned = [&](const EngineOptions& with) {
    auto made = engine_of(workload, with, bytes_per_second, latency);
    made->plan();
    return made;
  };
  std::shared_ptr<Engine> engine = planned(options);
  if (residents == Residents::by_time && options.budget > 0 && !workload.layers.empty()) {
    EngineOptions timed = options;
    timed.prior = engine->plan_for_reuse();
    AccessPattern pattern = pattern_of(workload, *timed.prior, bytes_per_second, latency);
    // A group takes more on the device than its weights do on the bus: what lies between them.
    pattern.copy_bytes.assign(pattern.bytes.begin(), pattern.bytes.end());
    const std::vector<Engine::GroupReport> groups = engine->groups();
    for (std::size_t i = 0; i < groups.size(); ++i) pattern.bytes[i] = groups[i].bytes;
    timed.prior->resident = place_by_time(pattern, options.budget, options.prefetch).resident;
    engine = planned(timed);
  }
  auto& clock = const_cast<VirtualBackend&>(static_cast<const VirtualBackend&>(engine->backend()));

  Result result;
  const int warm_up = passes / 2;
  for (int pass = 0; pass < warm_up; ++pass) {
    run_pass(workload, *engine, clock);
    if (pass == 0) result.first_pass_seconds = clock.seconds();
  }
  const Count before(clock, *engine);
  for (int pass = warm_up; pass < passes; ++pass) run_pass(workload, *engine, clock);
  const Count after(clock, *engine);
  const double measured = passes - warm_up;

  result.seconds = (after.seconds - before.seconds) / measured;
  result.stall_seconds = (after.stalled - before.stalled) / measured;
  result.moved_bytes = (after.bytes - before.bytes) / measured;
  result.copies = (after.copies - before.copies) / measured;
  result.misses = (after.misses - before.misses) / measured;
  for (WeightId i = 0; i < workload.layers.size(); ++i) {
    result.compute_seconds += workload.layers[i].compute_seconds;
    if (!engine->resident(i)) result.streamed_bytes += workload.layers[i].bytes;
  }
  const Stats stats = engine->stats();
  result.resident_bytes = stats.resident_bytes;
  result.arena_bytes = stats.arena_bytes;
  result.groups = stats.groups;
  result.streamed_groups = stats.groups - stats.resident_groups;
  result.depth = stats.depth;
  result.copy_seconds = static_cast<double>(result.streamed_bytes) / bytes_per_second +
                        static_cast<double>(result.streamed_groups) * latency;
  result.limit_seconds = std::max(result.compute_seconds, result.copy_seconds);
  result.ratio = result.limit_seconds > 0 ? result.seconds / result.limit_seconds : 1;
  return result;
}

}  // namespace dynswap::sim
