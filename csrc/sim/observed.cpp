#include "sim/observed.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

namespace dynswap::sim {

namespace {

constexpr double kNanosecond = 1e-9;
constexpr std::size_t kMostSteps = 4096;  ///< a search walks them thousands of times

double seconds_between(std::int64_t begin, std::int64_t end) {
  return kNanosecond * static_cast<double>(std::max<std::int64_t>(0, end - begin));
}

std::uint64_t main_thread(const Timeline& timeline) {
  std::map<std::uint64_t, std::size_t> uses;
  for (const Span& span : timeline.spans) {
    if (span.kind == Span::Kind::use) ++uses[span.thread];
  }
  const auto most = std::max_element(uses.begin(), uses.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == uses.end() ? 0 : most->first;
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
    pattern.bytes.push_back(group.bytes);
    pattern.copy_bytes.push_back(static_cast<double>(group.master_bytes));
  }
  pattern.bytes_per_second = bus_speed(timeline);

  const std::uint64_t thread = main_thread(timeline);
  std::vector<const Span*> spans;
  std::vector<std::size_t> passes;  // where each begins in `spans`
  for (const Span& span : timeline.spans) {
    if (span.kind == Span::Kind::copy || span.thread != thread) continue;
    if (span.kind == Span::Kind::pass) passes.push_back(spans.size());
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

  double before_first_use = 0;
  for (std::size_t i = first; i < last; ++i) {
    const Span& span = *spans[i];
    const double after = seconds_between(span.when.end, spans[i + 1]->when.begin);
    if (span.kind == Span::Kind::wait)
      observed.wait_seconds += seconds_between(span.when.begin, span.when.end);
    if (span.kind == Span::Kind::use && (pattern.steps.empty() || pattern.steps.back().group != span.group)) {
      pattern.steps.push_back({span.group, 0, true});
    }
    (pattern.steps.empty() ? before_first_use : pattern.steps.back().compute_seconds) += after;
    observed.compute_seconds += after;
  }
  if (pattern.steps.empty()) return {};
  pattern.steps.back().compute_seconds += before_first_use;
  observed.compute_seconds /= static_cast<double>(observed.passes);
  observed.wait_seconds /= static_cast<double>(observed.passes);
  return observed;
}

}  // namespace dynswap::sim
