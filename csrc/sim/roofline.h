// How close to the limit max(compute, copy) the engine comes, for a model's shape and a bus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/engine.h"
#include "sim/access_pattern.h"
#include "sim/virtual_backend.h"
#include "sim/virtual_mesh.h"

namespace dynswap::sim {

/// One weight, in the order of use.
struct Layer {
  std::string name;
  std::uint64_t bytes = 0;
  double compute_seconds = 0;          ///< of the kernels that read it
  std::uint64_t unit = 0;              ///< its module; a module's weights are consecutive
  bool at_once = false;                ///< a call needs all of the unit at the same time
  std::shared_ptr<const File> file{};  ///< its master is mapped from here; null: it is in RAM
  std::uint64_t offset = 0;            ///< bytes from the start of `file`
  bool cast = false;  ///< on its way to the device, which has no bytes of the file as they are
  /// The part of the experts that follow each other which a pass uses, in no order, if the layer's unit is an
  /// expert (Note [Groups by use]). 0: every pass uses it, in this order.
  double by_use = 0;
  std::vector<std::uint64_t> also_in{};  ///< units of other modules that have it, and need it at once
};

struct Workload {
  std::vector<Layer> layers;
  DeviceTraits device = kAcceleratorTraits;
  /// The time that the host takes. It runs ahead, and waits at the end of each pass. None: it takes no time,
  /// and keeps pace with the device.
  std::optional<HostTimes> host{};
  /// The ranks among which copies are shared out. None: each copies all bytes.
  std::optional<Mesh> mesh{};
};

/// All figures are of one pass in the steady state.
struct Result {
  double seconds = 0;
  double compute_seconds = 0;
  double copy_seconds = 0;   ///< what the bus needs for the streamed weights, each once; of a mesh, its part
  double link_seconds = 0;   ///< what the rest needs that comes from the other ranks
  double limit_seconds = 0;  ///< max(compute_seconds, copy_seconds, link_seconds)
  double ratio = 0;          ///< seconds / limit_seconds; below 1 if whole copies are faster than parts
  double stall_seconds = 0;  ///< the consumer waited for copies
  double copies = 0;
  double misses = 0;
  double moved_bytes = 0;  ///< bytes that did travel over the bus
  double gathered = 0;     ///< copies of which each rank brought a part
  double first_pass_seconds = 0;
  std::uint64_t streamed_bytes = 0;  ///< bytes of the weights that are not resident
  std::uint64_t resident_bytes = 0;
  std::uint64_t arena_bytes = 0;
  std::uint64_t groups = 0;
  std::uint64_t streamed_groups = 0;
  std::uint64_t slot_bytes = 0;  ///< the largest streamed group
  std::uint64_t depth = 0;
};

/// What decides which budgets work: the largest group that is left when each large weight travels alone, and
/// the largest of an expert's.
struct LargestGroup {
  std::size_t bytes = 0;            ///< of both: also the smallest budget that works
  std::vector<std::size_t> layers;  ///< by their numbers
};

/// Nothing without layers.
LargestGroup largest_group(const Workload& workload);

/// How residents are chosen.
enum class Residents : bool {
  even,     ///< spread over the bytes (core/residency.h)
  by_time,  ///< by what they save (placement.h)
};

/// The groups that an engine with these options forms of the workload, and when they are used.
AccessPattern pattern_of(const Workload& workload, const PriorPlan& groups, double bytes_per_second,
                         double latency);

/// Runs the real engine over the virtual clock: in each pass each module acquires its weights, computes,
/// and lets go of them. Which experts a pass uses is drawn for each pass, every time the same. As in an
/// install, experts are weights like any other where the budget holds everything. The first half of `passes`
/// (at least one) is warm-up; ranks of a mesh need three to know the order of use. Throws what the engine
/// throws, BudgetError for instance.
Result simulate(const Workload& workload, const EngineOptions& options, double bytes_per_second,
                double latency, int passes, Residents residents = Residents::even);

}  // namespace dynswap::sim
