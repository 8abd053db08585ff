#include "sim/roofline.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <utility>

#include "core/check.h"
#include "sim/placement.h"

namespace dynswap::sim {

namespace {

/// An engine, and what it has for a backend.
struct Simulated {
  std::shared_ptr<Engine> engine;
  VirtualBackend* clock = nullptr;
  VirtualMesh* mesh = nullptr;  ///< around the clock; null: this process copies for itself alone
};

/// What has been counted so far; the difference of two is what happened between them.
struct Count {
  explicit Count(const Simulated& simulated)
      : seconds(simulated.clock->seconds()),
        stalled(simulated.clock->stalled()),
        bytes(static_cast<double>(simulated.clock->bytes_copied())),
        copies(static_cast<double>(simulated.clock->copies())),
        misses(static_cast<double>(simulated.engine->stats().misses)),
        gathered(simulated.mesh ? static_cast<double>(simulated.mesh->figures().gathered) : 0) {}
  double seconds, stalled, bytes, copies, misses, gathered;
};

/// A pass over the units, on the virtual clock.
class Pass {
 public:
  Pass(const Workload& workload, const Simulated& simulated, std::mt19937& drawn)
      : layers_(workload.layers),
        engine_(*simulated.engine),
        clock_(*simulated.clock),
        mesh_(simulated.mesh),
        drawn_(drawn) {}

  void run() {
    if (mesh_) mesh_->begin_pass();
    for (std::size_t first = 0; first < layers_.size();) {
      first = layers_[first].by_use > 0 ? use_experts(first) : use(first, 1);
    }
    clock_.wait_for_consumer();
  }

 private:
  std::size_t end_of_unit(std::size_t first) const {
    std::size_t end = first;
    while (end < layers_.size() && layers_[end].unit == layers_[first].unit) ++end;
    return end;
  }

  /// Uses the unit that begins at `first`, with its compute `times` over. Returns its end.
  std::size_t use(std::size_t first, double times) {
    const std::size_t end = end_of_unit(first);
    std::vector<Lease> leases;
    double compute = 0;
    for (; first < end; ++first) {
      leases.push_back(engine_.acquire(static_cast<WeightId>(first), kConsumer));
      compute += layers_[first].compute_seconds;
    }
    clock_.kernel(compute * times);
    return end;
  }

  /// Uses as many of the experts that begin at `first` as a pass does, which together take the compute of all
  /// of them. Returns their end.
  std::size_t use_experts(std::size_t first) {
    const double part = layers_[first].by_use;
    std::vector<std::size_t> experts;
    while (first < layers_.size() && layers_[first].by_use == part) {
      experts.push_back(first);
      first = end_of_unit(first);
    }
    const auto all = experts.size();
    const auto used = std::clamp<std::size_t>(std::lround(part * static_cast<double>(all)), 1, all);
    for (std::size_t i = 0; i < used; ++i) std::swap(experts[i], experts[i + drawn_() % (all - i)]);
    experts.resize(used);
    std::sort(experts.begin(), experts.end());
    for (const std::size_t expert : experts)
      use(expert, static_cast<double>(all) / static_cast<double>(used));
    return first;
  }

  const std::vector<Layer>& layers_;
  Engine& engine_;
  VirtualBackend& clock_;
  VirtualMesh* const mesh_;
  std::mt19937& drawn_;
};

/// An engine that is given the workload's weights. They are numbered as the layers are.
Simulated engine_of(const Workload& workload, const EngineOptions& options, double bytes_per_second,
                    double latency) {
  constexpr std::size_t kNoCap = std::numeric_limits<std::size_t>::max();
  auto clock =
      std::make_unique<VirtualBackend>(bytes_per_second, latency, kNoCap, workload.device, workload.host);
  Simulated simulated{nullptr, clock.get()};
  std::unique_ptr<Backend> backend;
  if (workload.mesh) {
    auto mesh = std::make_unique<VirtualMesh>(std::move(clock), *workload.mesh, latency);
    simulated.mesh = mesh.get();
    backend = std::move(mesh);
  } else {
    backend = std::move(clock);
  }
  auto engine = std::make_shared<Engine>(std::move(backend), options);
  simulated.engine = engine;
  for (const Layer& layer : workload.layers) {
    auto source = std::make_shared<Source>();
    source->name = layer.name;
    source->count = layer.bytes;
    source->stored = layer.cast ? Scalar::f8_e5m2 : source->wanted;
    source->file = layer.file;
    source->offset = layer.offset;
    const bool by_use = layer.by_use > 0;
    const WeightId id =
        engine->add_weight(std::move(source), layer.unit, {.at_once = layer.at_once, .by_use = by_use});
    for (const std::uint64_t unit : layer.also_in)
      engine->share_weight(id, unit, {.at_once = true, .by_use = by_use});
  }
  return simulated;
}

/// The workload as an install has it: where the budget holds everything, experts are weights like any other.
Workload as_installed(const Workload& workload, const EngineOptions& options) {
  Workload whole = workload;
  for (Layer& layer : whole.layers) layer.by_use = 0;
  return engine_of(whole, options, 1, 0).engine->holds_all() ? whole : workload;
}

}  // namespace

LargestGroup largest_group(const Workload& workload) {
  EngineOptions options;
  options.budget = 1;
  LargestGroup found;
  try {
    engine_of(workload, options, 1, 0).engine->arrange();
  } catch (const BudgetError& error) {  // no group has so few bytes
    found.bytes = error.smallest_bytes();
  }
  options.budget = found.bytes;
  const auto engine = engine_of(workload, options, 1, 0).engine;
  engine->arrange();
  const std::vector<Engine::GroupReport> groups = engine->groups();
  for (const bool by_use : {false, true}) {
    const Engine::GroupReport* largest = nullptr;
    for (const Engine::GroupReport& group : groups) {
      if ((workload.layers[group.weights.front()].by_use > 0) != by_use) continue;
      if (largest == nullptr || group.bytes > largest->bytes) largest = &group;
    }
    if (largest != nullptr)
      found.layers.insert(found.layers.end(), largest->weights.begin(), largest->weights.end());
  }
  return found;
}

AccessPattern pattern_of(const Workload& workload, const PriorPlan& groups, double bytes_per_second,
                         double latency) {
  AccessPattern pattern;
  pattern.bytes_per_second = bytes_per_second;
  pattern.latency = latency;
  pattern.groups.resize(groups.resident.size());
  const std::vector<Layer>& layers = workload.layers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const GroupId group = groups.group_of[i];
    pattern.groups[group].bytes += layers[i].bytes;
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

Result simulate(const Workload& given, const EngineOptions& options, double bytes_per_second, double latency,
                int passes, Residents residents) {
  DYNSWAP_CHECK(passes >= 2, "the first half of the passes is warm-up: give two at least");
  DYNSWAP_CHECK(!given.mesh || residents == Residents::even,
                "ranks have the same residents: choose even ones");
  const Workload workload = as_installed(given, options);
  const auto planned = [&](const EngineOptions& with) {
    auto made = engine_of(workload, with, bytes_per_second, latency);
    made.engine->plan();
    return made;
  };
  Simulated simulated = planned(options);
  EngineOptions timed = options;
  timed.prior = simulated.engine->plan_for_reuse();
  timed.prior->order.clear();  // each engine learns it
  const std::vector<Engine::GroupReport> groups = simulated.engine->groups();
  const bool experts =  // as they are before any retune()
      std::any_of(groups.begin(), groups.end(), std::mem_fn(&Engine::GroupReport::by_use));
  if (residents == Residents::by_time && !experts && options.budget > 0 && !workload.layers.empty()) {
    AccessPattern pattern = pattern_of(workload, *timed.prior, bytes_per_second, latency);
    // A group takes more on the device than its weights do on the bus: what lies between them.
    for (std::size_t i = 0; i < groups.size(); ++i) {
      pattern.copy_bytes.push_back(static_cast<double>(pattern.groups[i].bytes));
      pattern.groups[i].bytes = groups[i].bytes;
    }
    timed.prior->resident = place_by_time(pattern, options.budget, options.prefetch).resident;
    simulated = planned(timed);
  }
  const Engine& engine = *simulated.engine;

  Result result;
  const int warm_up = passes / 2;
  std::mt19937 drawn;
  for (int pass = 0; pass < warm_up; ++pass) {
    Pass(workload, simulated, drawn).run();
    if (pass == 0) result.first_pass_seconds = simulated.clock->seconds();
  }
  const Count before(simulated);
  for (int pass = warm_up; pass < passes; ++pass) Pass(workload, simulated, drawn).run();
  const Count after(simulated);
  const double measured = passes - warm_up;

  result.seconds = (after.seconds - before.seconds) / measured;
  result.stall_seconds = (after.stalled - before.stalled) / measured;
  result.moved_bytes = (after.bytes - before.bytes) / measured;
  result.copies = (after.copies - before.copies) / measured;
  result.misses = (after.misses - before.misses) / measured;
  result.gathered = (after.gathered - before.gathered) / measured;
  for (WeightId i = 0; i < workload.layers.size(); ++i) {
    result.compute_seconds += workload.layers[i].compute_seconds;
    if (!engine.resident(i)) result.streamed_bytes += workload.layers[i].bytes;
  }
  for (const Engine::GroupReport& group : engine.groups()) {
    if (!group.resident) result.slot_bytes = std::max<std::uint64_t>(result.slot_bytes, group.bytes);
  }
  const Stats stats = engine.stats();
  result.resident_bytes = stats.resident_bytes;
  result.arena_bytes = stats.arena_bytes;
  result.groups = stats.groups;
  result.streamed_groups = stats.groups - stats.resident_groups;
  result.depth = stats.depth;
  const double ranks = workload.mesh ? static_cast<double>(workload.mesh->ranks) : 1;
  const auto part = static_cast<double>(result.streamed_bytes) / ranks;
  const double latencies = static_cast<double>(result.streamed_groups) * latency;
  result.copy_seconds = part / bytes_per_second + latencies;
  if (workload.mesh) result.link_seconds = (ranks - 1) * part / workload.mesh->bytes_per_second + latencies;
  result.limit_seconds = std::max({result.compute_seconds, result.copy_seconds, result.link_seconds});
  result.ratio = result.limit_seconds > 0 ? result.seconds / result.limit_seconds : 1;
  return result;
}

}  // namespace dynswap::sim
