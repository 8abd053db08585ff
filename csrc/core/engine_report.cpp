// Engine: what has been counted and recorded, and a plan to give to another engine.
#include <algorithm>
#include <mutex>
#include <utility>

#include "core/engine.h"

namespace dynswap {

Stats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats = stats_;
  if (!abandoned_) stats.host_synchronisations = backend_->host_synchronisations();
  return stats;
}

void Engine::reset_counters() {
  const std::lock_guard lock(mutex_);
  stats_.clear_counters();
  for (Group& group : groups_) group.figures = {};
  note_peak();
}

std::vector<Engine::GroupReport> Engine::groups() const {
  std::vector<GroupReport> reports;
  {
    const std::lock_guard lock(mutex_);
    for (const Group& group : groups_) {
      if (group.short_lived) {  // they are the last
        if (reports.empty() || !reports.back().short_lived) reports.emplace_back().short_lived = true;
        GroupReport& all = reports.back();
        all.bytes += group.bytes;
        all.master_bytes += group.bytes;
        if (group.first_use != 0 && all.first_use - 1 >= group.first_use) all.first_use = group.first_use;
        all.figures.add(group.figures);
        continue;
      }
      std::uint64_t master_bytes = 0;
      for (const WeightId id : group.weights) master_bytes += weights_[id].source->stored_bytes();
      const bool resident = closed_ ? group.resident : group.home != nullptr;
      reports.push_back({group.weights, group.bytes, master_bytes, resident, group.keep, group.by_use,
                         group.first_use, /*short_lived=*/false, group.figures});
    }
  }
  if (!backend_->device_time()) return reports;
  for (GroupReport& report : reports) {
    report.figures.copy_ns.reset();
    report.figures.stall_ns = {};
  }
  for (const Span& span : timeline().spans) {
    if (reports.empty()) break;
    GroupFigures& figures = reports[std::min<std::size_t>(span.group, reports.size() - 1)].figures;
    const auto ns = static_cast<std::uint64_t>(span.when.end - span.when.begin);
    if (span.kind == Span::Kind::copy) figures.copy_ns = figures.copy_ns.value_or(0) + ns;
    if (span.kind == Span::Kind::wait) figures.stall_ns[static_cast<std::size_t>(span.cause)] += ns;
  }
  return reports;
}

PriorPlan Engine::plan_for_reuse() const {
  const std::lock_guard lock(mutex_);
  PriorPlan plan;
  for (const Group& group : groups_) {
    if (!group.short_lived) plan.resident.push_back(group.resident);
  }
  for (const Weight& weight : weights_) {
    if (weight.group < plan.resident.size()) plan.group_of.push_back(weight.group);
  }
  plan.cache_bytes = cache_.bytes();
  const auto streamed = std::find_if(groups_.begin(), groups_.end(),
                                     [](const Group& group) { return !group.home && !group.by_use; });
  if (streamed != groups_.end())
    plan.order = schedule_.order_after(static_cast<GroupId>(streamed - groups_.begin()), groups_.size());
  std::erase_if(plan.order, [&](GroupId id) { return id >= plan.resident.size(); });
  return plan;
}

bool Engine::planned() const {
  const std::lock_guard lock(mutex_);
  return planned_ && !closed_;
}

void Engine::record(bool on) {
  if (abandoned_) return;
  backend_->keep_times(on);
  if (on) {
    recorder_.begin();
  } else {
    recorder_.end();
    // Whoever reads it next shall find all of it.
    for (const EventPtr& end : recorder_.ends()) backend_->synchronise(end);
  }
}

void Engine::note_use(WeightId weight, Stream consumer) {
  std::size_t bytes = 0, saved = 0;
  GroupId group = 0;
  {
    const std::lock_guard lock(mutex_);
    if (abandoned_ || closed_) return;
    bytes = held_bytes();
    saved = kept_ + short_lived_now_;
    group = weights_[weight].group;
  }
  recorder_.used(group, backend_->mark(consumer), bytes, saved);
}

void Engine::note_pass(Stream consumer) {
  if (!abandoned_) recorder_.pass(backend_->mark(consumer));
}

}  // namespace dynswap
