#include "core/recorder.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "platform/process.h"

namespace dynswap {

/// Note [Why a wait was one]: the copy that a consumer waits for began when the one before it was over, or
/// else the bus was idle. A bus that worked through is the limit, however early the copy had been asked
/// for; one that was idle for half of the wait could have brought the weight sooner, had the copy been issued
/// sooner, and what kept it from that was noted when it was foreseen. What nobody foresaw is a matter of its
/// own.
Cause why(const Lateness& late, std::int64_t stalled_ns) {
  const Cause reason = late.held_back.value_or(late.prefetched ? Cause::late_prefetch : Cause::not_predicted);
  const bool foreseen =
      reason != Cause::first_use && reason != Cause::not_predicted && reason != Cause::master_changed;
  if (!late.prefetched && !foreseen) return reason;
  const std::optional<Interval> own = late.copied->when();
  const std::optional<Interval> before = late.behind ? late.behind->when() : std::nullopt;
  const bool idle = !before || (own && own->begin - before->end > stalled_ns / 2);
  return idle ? reason : Cause::bus_bound;
}

void Recorder::begin() {
  Recorded& recorded = *recorded_;
  const std::lock_guard lock(recorded.mutex);
  recorded.entries.clear();
  recorded.dropped = 0;
  on_.store(true);
}

void Recorder::add(Entry entry) {
  if (!entry.to) return;
  Recorded& recorded = *recorded_;
  const std::lock_guard lock(recorded.mutex);
  if (recorded.entries.size() == kMost) {
    ++recorded.dropped;
    return;
  }
  recorded.entries.push_back(std::move(entry));
}

void Recorder::copied(std::uint32_t group, EventPtr copy, bool demanded, std::uint64_t bytes) {
  if (!on()) return;
  add({{.kind = Span::Kind::copy, .group = group, .demanded = demanded, .bytes = bytes},
       nullptr,
       std::move(copy),
       {}});
}

void Recorder::copied_out(std::uint32_t group, EventPtr from, EventPtr to, std::uint64_t bytes) {
  if (!on()) return;
  add({{.kind = Span::Kind::copy_out, .group = group, .bytes = bytes}, std::move(from), std::move(to), {}});
}

void Recorder::waited(std::uint32_t group, EventPtr from, EventPtr to, Lateness late) {
  if (!on() || !from) return;
  add({{.kind = Span::Kind::wait, .group = group, .thread = thread_id()},
       std::move(from),
       std::move(to),
       std::move(late)});
}

void Recorder::used(std::uint32_t group, EventPtr at, std::uint64_t held_bytes, std::uint64_t saved_bytes) {
  if (!on()) return;
  add({{.kind = Span::Kind::use,
        .group = group,
        .bytes = held_bytes,
        .saved_bytes = saved_bytes,
        .thread = thread_id()},
       nullptr,
       std::move(at),
       {}});
}

void Recorder::pass(EventPtr at) {
  if (!on()) return;
  add({{.kind = Span::Kind::pass, .thread = thread_id()}, nullptr, std::move(at), {}});
}

std::vector<EventPtr> Recorder::ends() const {
  Recorded& recorded = *recorded_;
  const std::lock_guard lock(recorded.mutex);
  std::vector<EventPtr> ends;
  for (const Entry& entry : recorded.entries) ends.push_back(entry.to);
  return ends;
}

Timeline Recorder::timeline() const {
  std::vector<Entry> entries;
  Timeline timeline;
  {
    Recorded& recorded = *recorded_;
    const std::lock_guard lock(recorded.mutex);
    entries = recorded.entries;
    timeline.dropped = recorded.dropped;
  }
  for (const Entry& entry : entries) {
    const std::optional<Interval> to = entry.to->when();
    const std::optional<Interval> from = entry.from ? entry.from->when() : to;
    if (!to || !from) continue;
    Span span = entry.span;
    span.when = {from->begin, to->end};
    if (entry.late) span.cause = why(*entry.late, span.when.end - span.when.begin);
    timeline.spans.push_back(span);
  }
  std::stable_sort(timeline.spans.begin(), timeline.spans.end(),
                   [](const Span& a, const Span& b) { return a.when.begin < b.when.begin; });
  return timeline;
}

}  // namespace dynswap
