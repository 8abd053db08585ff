#include "sim/placement.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/residency.h"
#include "sim/virtual_backend.h"

namespace dynswap::sim {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr Stream kConsumer = 0;

/// Accesses of the engine that a search may make: a fraction of a second.
constexpr std::size_t kEngineSteps = 60'000;

/// A set of residents, and what it costs.
struct Candidate {
  std::vector<bool> resident;
  std::size_t resident_bytes = 0;
  double seconds = kNever;

  /// By time; where that is the same, by what has to travel.
  bool better_than(const Candidate& other) const {
    const double tolerance = 1e-9 * std::min(seconds, other.seconds);
    if (std::abs(seconds - other.seconds) > tolerance) return seconds < other.seconds;
    return resident_bytes > other.resident_bytes;
  }
};

/// Searches from a candidate on by moves of one group or two, over whatever tells a candidate's seconds.
class Search {
 public:
  using Evaluate = std::function<void(Candidate&)>;

  Search(const AccessPattern& pattern, std::size_t budget)
      : pattern_(pattern), budget_(budget), random_(20'26) {}

  Candidate candidate(std::vector<bool> resident) const {
    Candidate made{std::move(resident), 0, kNever};
    for (std::size_t i = 0; i < made.resident.size(); ++i) {
      made.resident_bytes += made.resident[i] ? pattern_.bytes[i] : 0;
    }
    return made;
  }

  /// What the arena has to hold for the groups in use at one time, if these are streamed.
  bool fits(const Candidate& candidate) const {
    if (candidate.resident_bytes > budget_) return false;
    const std::size_t arena = budget_ - candidate.resident_bytes;
    std::size_t together = 0;
    for (const Step& step : pattern_.steps) {
      together += candidate.resident[step.group] ? 0 : pattern_.bytes[step.group];
      if (together > arena) return false;
      if (step.lets_go) together = 0;
    }
    return true;
  }

  /// Residents of at most `quota` bytes, such that what is streamed keeps in step with time: with the compute
  /// (`share` 1), with the bytes (0: evenly spread), or with both.
  Candidate in_step(std::size_t quota, double share) const {
    std::vector<double> compute(pattern_.bytes.size(), 0);
    double compute_total = 0;
    for (const Step& step : pattern_.steps) {
      compute[step.group] += step.compute_seconds;
      compute_total += step.compute_seconds;
    }
    double bytes_total = 0;
    for (const std::size_t bytes : pattern_.bytes) bytes_total += static_cast<double>(bytes);
    const auto streaming = [&](double streamed) {
      std::vector<bool> resident(pattern_.bytes.size());
      double owed = 0;
      for (std::size_t i = 0; i < resident.size(); ++i) {
        const auto bytes = static_cast<double>(pattern_.bytes[i]);
        const double time = compute_total > 0 ? compute[i] / compute_total : bytes / bytes_total;
        owed += streamed * (share * time + (1 - share) * bytes / bytes_total);
        resident[i] = owed < bytes / 2;
        if (!resident[i]) owed -= bytes;
      }
      return candidate(std::move(resident));
    };
    // Where much is computed for few bytes, not all that is owed can be streamed: so more may be asked for
    // than there is.
    double low = 0, high = 16 * bytes_total;
    for (int i = 0; i < 40; ++i) {
      const double middle = (low + high) / 2;
      (streaming(middle).resident_bytes > quota ? low : high) = middle;
    }
    return streaming(high);
  }

  /// The best met in a walk of `moves` that goes uphill ever less willingly.
  Candidate anneal(const Candidate& from, std::size_t moves, const Evaluate& evaluate) {
    Candidate best = from, at = from, next;
    std::uniform_real_distribution<double> chance(0, 1);
    for (std::size_t i = 0; i < moves; ++i) {
      if (!move(at, next)) continue;
      evaluate(next);
      const double left = 1 - static_cast<double>(i) / static_cast<double>(moves);
      const double temperature = warmest() * left * left * best.seconds;
      if (!next.better_than(at) && chance(random_) >= std::exp((at.seconds - next.seconds) / temperature))
        continue;
      std::swap(at, next);
      if (at.better_than(best)) best = at;
    }
    return best;
  }

 private:
  /// How much worse is often accepted at first, of the seconds: as much as one group is of them all.
  double warmest() const { return 1.0 / static_cast<double>(pattern_.bytes.size()); }

  /// One group more or less, or one for another; or nothing, if that does not fit.
  bool move(const Candidate& from, Candidate& to) {
    to = from;
    const int kind = static_cast<int>(random_() % 4);  // add, drop, swap, swap
    if (kind != 1) {
      const std::size_t added = pick(from.resident, false);
      if (added == kNone) return false;
      flip(to, added);
    }
    if (kind != 0) {
      const std::size_t dropped = pick(from.resident, true);
      if (dropped == kNone) return false;
      flip(to, dropped);
    }
    return fits(to);
  }

  static constexpr std::size_t kNone = ~std::size_t{0};

  void flip(Candidate& candidate, std::size_t group) const {
    candidate.resident[group] = !candidate.resident[group];
    if (candidate.resident[group]) {
      candidate.resident_bytes += pattern_.bytes[group];
    } else {
      candidate.resident_bytes -= pattern_.bytes[group];
    }
  }

  /// Any group that is (or is not) resident.
  std::size_t pick(const std::vector<bool>& resident, bool wanted) {
    std::vector<std::size_t> eligible;
    for (std::size_t i = 0; i < resident.size(); ++i) {
      if (resident[i] == wanted) eligible.push_back(i);
    }
    return eligible.empty() ? kNone : eligible[random_() % eligible.size()];
  }

  const AccessPattern& pattern_;
  const std::size_t budget_;
  std::mt19937_64 random_;
};

/// As the engine does by itself: residents spread over the bytes, and what is tiny and used again and again
/// in a pass stays (Note [Tiny weights stay]).
std::vector<bool> evenly(const AccessPattern& pattern, std::size_t budget, std::uint32_t depth) {
  std::vector<std::size_t> uses(pattern.bytes.size(), 0);
  for (const Step& step : pattern.steps) ++uses[step.group];
  const std::size_t once = *std::min_element(uses.begin(), uses.end());
  const std::size_t total = std::accumulate(pattern.bytes.begin(), pattern.bytes.end(), std::size_t{0});
  std::vector<bool> tiny;
  std::size_t tiny_bytes = 0;
  for (std::size_t i = 0; i < uses.size(); ++i) {
    tiny.push_back(uses[i] > once && pattern.bytes[i] <= total / kTinyPartOfModel);
    if (tiny.back()) tiny_bytes += pattern.bytes[i];
  }
  if (tiny_bytes > total / kTinyPartOfModel) return plan_residency(pattern.bytes, budget, depth).resident;
  return plan_residency(pattern.bytes, tiny, budget, depth).resident;
}

}  // namespace

double measure(const AccessPattern& pattern, const std::vector<bool>& resident, std::size_t budget,
               std::uint32_t prefetch) {
  auto backend = std::make_unique<VirtualBackend>(pattern.bytes_per_second, pattern.latency);
  VirtualBackend& clock = *backend;
  std::unordered_map<const Source*, double> copy_bytes;
  EngineOptions options;
  options.budget = budget;
  options.prefetch = prefetch;
  options.prior.emplace();
  options.prior->resident = resident;
  const std::size_t groups = pattern.bytes.size();
  options.prior->group_of.resize(groups);
  std::iota(options.prior->group_of.begin(), options.prior->group_of.end(), 0u);
  const auto engine = std::make_shared<Engine>(std::move(backend), options);
  for (std::size_t i = 0; i < groups; ++i) {
    auto source = std::make_shared<Source>();
    source->count = pattern.bytes[i];
    if (!pattern.copy_bytes.empty()) copy_bytes[source.get()] = pattern.copy_bytes[i];
    engine->add_weight(std::move(source), i);
  }
  try {
    engine->plan();
  } catch (const BudgetError&) {
    return kNever;
  }
  if (!copy_bytes.empty()) {
    clock.set_copy_bytes([&](const Piece& piece) {
      const double share = static_cast<double>(piece.count) / static_cast<double>(piece.source->count);
      return share * copy_bytes.at(piece.source.get());
    });
  }
  double begin = 0;
  constexpr int kWarmUp = 3;
  constexpr int kMeasured = 2;
  for (int round = 0; round < kWarmUp + kMeasured; ++round) {
    if (round == kWarmUp) begin = clock.seconds();
    std::vector<Lease> leases;
    for (const Step& step : pattern.steps) {
      leases.push_back(engine->acquire(step.group, kConsumer));
      clock.kernel(step.compute_seconds);
      if (step.lets_go) leases.clear();
    }
  }
  return (clock.seconds() - begin) / kMeasured;
}

Placement place_by_time(const AccessPattern& pattern, std::size_t budget, std::uint32_t prefetch) {
  DYNSWAP_CHECK(!pattern.steps.empty() && pattern.bytes_per_second > 0,
                "a pattern has steps, and a bus a speed");
  const std::size_t total = std::accumulate(pattern.bytes.begin(), pattern.bytes.end(), std::size_t{0});
  const std::vector<bool> even = evenly(pattern, budget, prefetch);
  const double seconds = measure(pattern, even, budget, prefetch);
  double compute = 0;
  for (const Step& step : pattern.steps) compute += step.compute_seconds;
  const bool hidden = seconds <= 1.0005 * compute;  // nothing is left to save
  if (total <= budget || budget == 0 || hidden) return {even, seconds};

  Search search(pattern, budget);
  const auto evaluate = [&](Candidate& candidate) {
    candidate.seconds = measure(pattern, candidate.resident, budget, prefetch);
  };
  std::vector<std::vector<bool>> starts;
  for (const std::uint32_t depth : {1u, 2u, 3u, 4u, 6u, 8u, 12u, 16u, 24u}) {
    std::vector<bool> resident = evenly(pattern, budget, depth);
    if (resident != even && std::find(starts.begin(), starts.end(), resident) == starts.end())
      starts.push_back(std::move(resident));
  }
  for (const double of_budget : {0.5, 0.7, 0.8, 0.88, 0.94, 0.97}) {
    const auto quota = static_cast<std::size_t>(of_budget * static_cast<double>(budget));
    for (const double share : {0.4, 0.7, 1.0}) starts.push_back(search.in_step(quota, share).resident);
  }
  Candidate best = search.candidate(even);
  best.seconds = seconds;
  for (std::vector<bool>& start : starts) {
    Candidate from = search.candidate(std::move(start));
    if (!search.fits(from)) continue;
    evaluate(from);
    if (from.better_than(best)) best = std::move(from);
  }
  best = search.anneal(best, kEngineSteps / (5 * pattern.steps.size()), evaluate);
  return {best.resident, best.seconds};
}

}  // namespace dynswap::sim
