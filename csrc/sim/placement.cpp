#include "sim/placement.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "core/check.h"
#include "core/residency.h"
#include "sim/measure.h"

namespace dynswap::sim {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// Accesses of the engine that a search may make: a fraction of a second.
constexpr std::size_t kEngineSteps = 60'000;

/// Sizes of the experts' cache that are measured, in addition to the engine's own.
constexpr std::size_t kCacheSizes = 8;

/// Steps for comparing the placements from which the search may begin. Only the longest rounds take more.
constexpr std::size_t kEngineStepsOfStarts = 600'000;

std::size_t bytes_of(const Groups& groups) {
  return std::accumulate(groups.begin(), groups.end(), std::size_t{0},
                         [](std::size_t sum, const GroupTraits& group) { return sum + group.bytes; });
}

/// How often the pattern uses each group.
std::vector<std::size_t> uses_of(const AccessPattern& pattern) {
  std::vector<std::size_t> uses(pattern.groups.size(), 0);
  for (const Step& step : pattern.steps) ++uses[step.group];
  return uses;
}

/// A set of residents, and what it costs.
struct Candidate {
  std::vector<bool> resident;
  std::size_t resident_bytes = 0;
  std::size_t saved_bytes = 0;  ///< which a round need not copy
  double seconds = kNever;

  /// By time; where that is the same, by what has to travel.
  bool better_than(const Candidate& other) const {
    const double tolerance = 1e-9 * std::min(seconds, other.seconds);
    if (std::abs(seconds - other.seconds) > tolerance) return seconds < other.seconds;
    return saved_bytes > other.saved_bytes;
  }
};

/// Searches from a candidate on by moves of one group or two, over whatever tells a candidate's seconds.
class Search {
 public:
  using Evaluate = std::function<void(Candidate&)>;

  Search(const AccessPattern& pattern, std::size_t budget)
      : pattern_(pattern), uses_(uses_of(pattern)), budget_(budget), random_(20'26) {}

  Candidate candidate(std::vector<bool> resident) const {
    Candidate made{std::move(resident), 0, 0, kNever};
    for (std::size_t i = 0; i < made.resident.size(); ++i) {
      if (!made.resident[i]) continue;
      made.resident_bytes += pattern_.groups[i].bytes;
      made.saved_bytes += uses_[i] * pattern_.groups[i].bytes;
    }
    return made;
  }

  /// What the arena has to hold for the groups in use at one time, if these are streamed.
  bool fits(const Candidate& candidate) const {
    if (candidate.resident_bytes > budget_) return false;
    const std::size_t arena = budget_ - candidate.resident_bytes;
    std::size_t together = 0;
    for (const Step& step : pattern_.steps) {
      together += candidate.resident[step.group] ? 0 : pattern_.groups[step.group].bytes;
      if (together > arena) return false;
      if (step.lets_go) together = 0;
    }
    return true;
  }

  bool used_equally() const {
    return std::adjacent_find(uses_.begin(), uses_.end(), std::not_equal_to<>()) == uses_.end();
  }

  /// Residents of at most `quota` bytes: if `most_used_first`, the groups that are used most, which in a
  /// round of several models are those of the model that is called most. Where not all that are used equally
  /// often fit, what is streamed of them keeps in step with time: with the compute (`share` 1), with the
  /// bytes (0: evenly spread), or with both. What is not used is streamed, which costs nothing.
  Candidate in_step(std::size_t quota, double share, bool most_used_first) const {
    const std::vector<bool> all(uses_.size(), true);
    if (!most_used_first) return candidate(in_step(quota, share, all));
    std::vector<std::size_t> counts = uses_;
    std::sort(counts.begin(), counts.end(), std::greater<>());
    counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
    std::vector<bool> resident(uses_.size(), false);
    for (const std::size_t count : counts) {
      if (count == 0) break;
      std::vector<bool> among(uses_.size());
      for (std::size_t i = 0; i < among.size(); ++i) among[i] = uses_[i] == count;
      const std::size_t bytes = candidate(among).resident_bytes;
      if (bytes > quota) among = in_step(quota, share, among);
      for (std::size_t i = 0; i < among.size(); ++i) resident[i] = resident[i] || among[i];
      if (bytes > quota) break;
      quota -= bytes;
    }
    return candidate(std::move(resident));
  }

  /// Chooses, within `quota` bytes, a `share` of the groups `among` all, which are used equally often, in
  /// step with the compute.
  std::vector<bool> in_step(std::size_t quota, double share, const std::vector<bool>& among) const {
    std::vector<double> compute(pattern_.groups.size(), 0);
    double compute_total = 0;
    for (const Step& step : pattern_.steps) {
      if (!among[step.group]) continue;
      compute[step.group] += step.compute_seconds;
      compute_total += step.compute_seconds;
    }
    const auto bytes_total = static_cast<double>(candidate(among).resident_bytes);
    const auto streaming = [&](double streamed) {
      std::vector<bool> resident(pattern_.groups.size(), false);
      double owed = 0;
      for (std::size_t i = 0; i < resident.size(); ++i) {
        if (!among[i]) continue;
        const auto bytes = static_cast<double>(pattern_.groups[i].bytes);
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
    return streaming(high).resident;
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
  double warmest() const { return 1.0 / static_cast<double>(pattern_.groups.size()); }

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
    const std::size_t bytes = pattern_.groups[group].bytes;
    if (candidate.resident[group]) {
      candidate.resident_bytes += bytes;
      candidate.saved_bytes += uses_[group] * bytes;
    } else {
      candidate.resident_bytes -= bytes;
      candidate.saved_bytes -= uses_[group] * bytes;
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
  const std::vector<std::size_t> uses_;
  const std::size_t budget_;
  std::mt19937_64 random_;
};

/// As the engine does by itself: residents spread over the bytes, and what is tiny and used again and again
/// in a pass stays (Note [Tiny weights stay]).
std::vector<bool> evenly(const AccessPattern& pattern, std::size_t budget, std::uint32_t depth) {
  const std::vector<std::size_t> uses = uses_of(pattern);
  std::size_t once = pattern.steps.size();
  for (const std::size_t count : uses) once = count > 0 ? std::min(once, count) : once;
  Groups groups = pattern.groups;
  const std::size_t most = bytes_of(groups) / kTinyPartOfModel;
  std::size_t tiny_bytes = 0;
  for (std::size_t i = 0; i < uses.size(); ++i) {
    groups[i].tiny = uses[i] > once && groups[i].bytes <= most;
    if (groups[i].tiny) tiny_bytes += groups[i].bytes;
  }
  if (tiny_bytes > most) groups = pattern.groups;
  return plan_residency(groups, budget, depth).resident;
}

/// The best that the search finds for groups in an order of which none is kept.
Placement search_residents(const AccessPattern& pattern, std::size_t budget, std::uint32_t prefetch) {
  DYNSWAP_CHECK(!pattern.steps.empty() && pattern.bytes_per_second > 0,
                "a pattern has steps, and a bus a speed");
  const std::vector<bool> even = evenly(pattern, budget, prefetch);
  const double seconds = measure(pattern, even, 0, budget, prefetch);
  double compute = 0;
  for (const Step& step : pattern.steps) compute += step.compute_seconds;
  const bool hidden = seconds <= 1.0005 * compute;  // nothing is left to save
  if (bytes_of(pattern.groups) <= budget || budget == 0 || hidden) return {even, seconds};

  Search search(pattern, budget);
  const auto evaluate = [&](Candidate& candidate) {
    candidate.seconds = measure(pattern, candidate.resident, 0, budget, prefetch);
  };
  std::vector<std::vector<bool>> starts;
  for (const std::uint32_t depth : {1u, 2u, 3u, 4u, 6u, 8u, 12u, 16u, 24u}) {
    std::vector<bool> resident = evenly(pattern, budget, depth);
    if (resident != even && std::find(starts.begin(), starts.end(), resident) == starts.end())
      starts.push_back(std::move(resident));
  }
  for (const bool most_used_first : {false, true}) {
    for (const double of_budget : {0.5, 0.7, 0.8, 0.88, 0.94, 0.97}) {
      const auto quota = static_cast<std::size_t>(of_budget * static_cast<double>(budget));
      for (const double share : {0.4, 0.7, 1.0})
        starts.push_back(search.in_step(quota, share, most_used_first).resident);
    }
    if (search.used_equally()) break;
  }
  Candidate best = search.candidate(even);
  best.seconds = seconds;
  // For the longest rounds only some are compared: the last ones, which begin with the most used groups.
  const std::size_t walk = (kWarmUpRounds + kMeasuredRounds) * pattern.steps.size();
  const std::size_t most = std::max<std::size_t>(1, kEngineStepsOfStarts / walk);
  for (std::size_t i = starts.size() - std::min(starts.size(), most); i < starts.size(); ++i) {
    Candidate from = search.candidate(std::move(starts[i]));
    if (!search.fits(from)) continue;
    evaluate(from);
    if (from.better_than(best)) best = std::move(from);
  }
  best = search.anneal(best, kEngineSteps / walk, evaluate);
  return {best.resident, best.seconds};
}

/// The pattern without the groups that have `trait`; the others are numbered in their order. The compute of
/// what is left out counts for the use before.
AccessPattern without(bool GroupTraits::* trait, const AccessPattern& pattern) {
  AccessPattern others;
  others.bytes_per_second = pattern.bytes_per_second;
  others.latency = pattern.latency;
  std::vector<std::uint32_t> number;
  for (std::size_t i = 0; i < pattern.groups.size(); ++i) {
    number.push_back(static_cast<std::uint32_t>(others.groups.size()));
    if (pattern.groups[i].*trait) continue;
    others.groups.push_back(pattern.groups[i]);
    if (!pattern.copy_bytes.empty()) others.copy_bytes.push_back(pattern.copy_bytes[i]);
  }
  double before_first = 0;
  for (const Step& step : pattern.steps) {
    if (!(pattern.groups[step.group].*trait)) {
      others.steps.push_back({number[step.group], step.compute_seconds, step.lets_go});
    } else {
      (others.steps.empty() ? before_first : others.steps.back().compute_seconds) += step.compute_seconds;
      if (step.lets_go && !others.steps.empty()) others.steps.back().lets_go = true;
    }
  }
  if (!others.steps.empty()) others.steps.back().compute_seconds += before_first;
  return others;
}

/// The placement of groups in an order. What is kept is neither copied nor chosen: only its compute counts.
Placement place_in_order(const AccessPattern& pattern, std::size_t budget, std::uint32_t prefetch) {
  std::size_t kept = 0;
  for (const GroupTraits& group : pattern.groups) kept += group.keep ? group.bytes : 0;
  if (kept == 0) return search_residents(pattern, budget, prefetch);
  return solve_without(&GroupTraits::keep, pattern.groups, [&](const Groups& streamed) -> Placement {
    const AccessPattern others = without(&GroupTraits::keep, pattern);
    if (others.steps.empty()) {
      double compute = 0;
      for (const Step& step : pattern.steps) compute += step.compute_seconds;
      return {std::vector<bool>(streamed.size(), false), compute};
    }
    if (kept >= budget) throw BudgetError("the budget does not hold what is kept", kept + 1);
    return search_residents(others, budget - kept, prefetch);
  });
}

}  // namespace

Placement place_by_time(const AccessPattern& pattern, std::size_t budget, std::uint32_t prefetch) {
  std::size_t expert_bytes = 0, largest_expert = 0, kept = 0;
  for (const GroupTraits& group : pattern.groups) {
    expert_bytes += group.by_use ? group.bytes : 0;
    largest_expert = std::max(largest_expert, group.by_use ? group.bytes : 0);
    kept += group.keep ? group.bytes : 0;
  }
  if (expert_bytes == 0) return place_in_order(pattern, budget, prefetch);
  const ResidencyPlan own = plan_residency(pattern.groups, budget, prefetch);
  Placement best{own.resident, measure(pattern, own.resident, own.cache_bytes, budget, prefetch),
                 own.cache_bytes};
  const auto consider = [&](std::vector<bool> resident, std::size_t cache) {
    const double seconds = measure(pattern, resident, cache, budget, prefetch);
    if (seconds < best.seconds) best = {std::move(resident), seconds, cache};
  };

  const AccessPattern others = without(&GroupTraits::by_use, pattern);
  if (others.steps.empty()) return best;
  const std::size_t most = std::min(budget, expert_bytes);
  for (std::size_t i = 0; i < kCacheSizes && most > largest_expert; ++i) {
    const std::size_t cache = largest_expert + (most - largest_expert) * i / kCacheSizes;
    if (budget - cache <= kept) break;
    try {
      const auto even = [&](const Groups& ordered) {
        return plan_residency(ordered, budget - cache, prefetch);
      };
      consider(solve_without(&GroupTraits::by_use, pattern.groups, even).resident, cache);
    } catch (const BudgetError&) {
      break;  // a larger cache leaves less
    }
  }
  const std::size_t cache = best.cache_bytes;
  const auto by_time = [&](const Groups&) { return place_in_order(others, budget - cache, prefetch); };
  consider(solve_without(&GroupTraits::by_use, pattern.groups, by_time).resident, cache);
  return best;
}

}  // namespace dynswap::sim
