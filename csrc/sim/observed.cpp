#include "sim/observed.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

namespace dynswap::sim {

namespace {

constexpr double kNanosecond = 1e-9;
constexpr std::size_t kMostSteps = 4096;  ///< a search walks them thousands of times

double seconds_between(std::int64_t begin, std::int64_t end) {
  return kNanosecond * static_cast<double>(std::max<std::int64_t>(0, end - begin));
}

/// The spans in which as many consumers waited at the same time, in order.
std::vector<Interval> waited_by(std::size_t consumers, const std::vector<const Span*>& spans) {
  std::vector<std::pair<std::int64_t, int>> changes;
  for (const Span* span : spans) {
    if (span->kind != Span::Kind::wait || span->when.end <= span->when.begin) continue;
    changes.emplace_back(span->when.begin, 1);
    changes.emplace_back(span->when.end, -1);
  }
  std::sort(changes.begin(), changes.end());
  std::vector<Interval> waited;
  std::size_t waiting = 0;
  std::int64_t since = 0;
  for (const auto& [when, change] : changes) {
    const bool all_before = waiting >= consumers;
    waiting += change > 0 ? 1 : -1;
    const bool all_now = waiting >= consumers;
    if (all_now && !all_before) since = when;
    if (all_before && !all_now && when > since) waited.push_back({since, when});
  }
  return waited;
}

/// What of [begin, end) no wait covers; `wait` is the first that may, and follows.
double computed(std::int64_t begin, std::int64_t end, const std::vector<Interval>& waited,
                std::vector<Interval>::const_iterator& wait) {
  double seconds = seconds_between(begin, end);
  while (wait != waited.end() && wait->end <= begin) ++wait;
  for (auto each = wait; each != waited.end() && each->begin < end; ++each)
    seconds -= seconds_between(std::max(begin, each->begin), std::min(end, each->end));
  return std::max(0.0, seconds);
}

/// Bytes of masters a second, while any copy was under way.
double bus_speed(const Timeline& timeline) {
  double bytes = 0;
  std::int64_t busy = 0;
  std::int64_t until = INT64_MIN;
  for (const Span& span : timeline.spans) {  // in the order of their beginnings
    if (span.kind != Span::Kind::copy) continue;
    bytes += static_cast<double>(span.bytes);
    busy += std::max<std::int64_t>(0, span.when.end - std::max(span.when.begin, until));
    until = std::max(until, span.when.end);
  }
  return busy > 0 ? bytes / (kNanosecond * static_cast<double>(busy)) : 0;
}

}  // namespace

Observed observe(const Timeline& timeline, const std::vector<Engine::GroupReport>& groups) {
  Observed observed;
  AccessPattern& pattern = observed.pattern;
  for (const Engine::GroupReport& group : groups) {
    if (group.short_lived) break;
    pattern.groups.push_back({.bytes = group.bytes, .keep = group.keep, .by_use = group.by_use});
    pattern.copy_bytes.push_back(static_cast<double>(group.master_bytes));
  }
  pattern.bytes_per_second = bus_speed(timeline);

  std::vector<const Span*> spans;
  std::vector<std::size_t> passes;  // where each begins in `spans`
  std::set<std::uint64_t> callers;
  for (const Span& span : timeline.spans) {
    if (span.kind == Span::Kind::copy) continue;
    if (span.kind == Span::Kind::pass) {
      passes.push_back(spans.size());
      callers.insert(span.thread);
    }
    spans.push_back(&span);
  }
  if (passes.size() < 2) return observed;
  std::size_t first = passes.front();
  const std::size_t last = passes.back();
  observed.passes = passes.size() - 1;
  if (last - first > kMostSteps) {  // the latest ones will do
    const auto from = std::lower_bound(passes.begin(), passes.end() - 2, last - kMostSteps);
    first = *from;
    observed.passes = static_cast<std::size_t>(passes.end() - from) - 1;
  }

  const std::vector<Interval> waited = waited_by(callers.size(), spans);
  auto wait = waited.begin();
  double before_first_use = 0;
  for (std::size_t i = first; i < last; ++i) {
    const Span& span = *spans[i];
    if (span.kind == Span::Kind::wait)
      observed.wait_seconds += seconds_between(span.when.begin, span.when.end);
    const bool of_weights = span.kind == Span::Kind::use && span.group < pattern.groups.size();
    if (of_weights && (pattern.steps.empty() || pattern.steps.back().group != span.group)) {
      pattern.steps.push_back({span.group, 0, true});
    }
    const double seconds = computed(span.when.begin, spans[i + 1]->when.begin, waited, wait);
    (pattern.steps.empty() ? before_first_use : pattern.steps.back().compute_seconds) += seconds;
    observed.compute_seconds += seconds;
  }
  if (pattern.steps.empty()) return {};
  pattern.steps.back().compute_seconds += before_first_use;
  observed.compute_seconds /= static_cast<double>(observed.passes);
  observed.wait_seconds /= static_cast<double>(observed.passes);
  return observed;
}

}  // namespace dynswap::sim
