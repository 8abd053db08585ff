#include "sim/roofline.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/check.h"
#include "sim/virtual_backend.h"

namespace dynswap::sim {

namespace {

constexpr Stream kConsumer = 0;

/// What has been counted so far; the difference of two is what happened between them.
struct Count {
  Count(const VirtualBackend& clock, const Engine& engine)
      : seconds(clock.now()),
        stalled(clock.stalled()),
        bytes(static_cast<double>(clock.bytes_copied())),
        copies(static_cast<double>(clock.copies())),
        misses(static_cast<double>(engine.stats().misses)) {}
  double seconds, stalled, bytes, copies, misses;
};

void run_pass(const Workload& workload, const std::vector<WeightId>& weights, Engine& engine,
              VirtualBackend& clock) {
  const std::vector<Layer>& layers = workload.layers;
  for (std::size_t first = 0; first < layers.size();) {
    std::vector<Lease> leases;
    double compute = 0;
    const std::uint64_t unit = layers[first].unit;
    for (; first < layers.size() && layers[first].unit == unit; ++first) {
      leases.push_back(engine.acquire(weights[first], kConsumer));
      compute += layers[first].compute_seconds;
    }
    clock.kernel(compute);
  }
}

}  // namespace

Result simulate(const Workload& workload, const EngineOptions& options, double bytes_per_second,
                double latency, int passes) {
  DYNSWAP_CHECK(passes >= 2, "the first half of the passes is warm-up: give two at least");
  auto backend = std::make_unique<VirtualBackend>(bytes_per_second, latency);
  VirtualBackend& clock = *backend;
  const auto engine = std::make_shared<Engine>(std::move(backend), options);

  std::vector<WeightId> weights;
  for (const Layer& layer : workload.layers) {
    auto source = std::make_shared<Source>();
    source->name = layer.name;
    source->count = layer.bytes;
    weights.push_back(engine->add_weight(std::move(source), layer.unit));
  }
  engine->plan();

  Result result;
  const int warm_up = passes / 2;
  for (int pass = 0; pass < warm_up; ++pass) {
    run_pass(workload, weights, *engine, clock);
    if (pass == 0) result.first_pass_seconds = clock.now();
  }
  const Count before(clock, *engine);
  for (int pass = warm_up; pass < passes; ++pass) run_pass(workload, weights, *engine, clock);
  const Count after(clock, *engine);
  const double measured = passes - warm_up;

  result.seconds = (after.seconds - before.seconds) / measured;
  result.stall_seconds = (after.stalled - before.stalled) / measured;
  result.moved_bytes = (after.bytes - before.bytes) / measured;
  result.copies = (after.copies - before.copies) / measured;
  result.misses = (after.misses - before.misses) / measured;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    result.compute_seconds += workload.layers[i].compute_seconds;
    if (!engine->resident(weights[i])) result.streamed_bytes += workload.layers[i].bytes;
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
