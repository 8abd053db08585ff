// Session: what Python is told about the groups, and a plan made from what was recorded.
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "accelerator/torch_stream.h"
#include "io/private_pages.h"
#include "session/module_state.h"
#include "session/session.h"
#include "sim/measure.h"
#include "sim/observed.h"
#include "sim/placement.h"

namespace dynswap {

namespace {

/// Whether most of a master that was mapped from a file has been written to since: those bytes are in RAM.
bool mostly_written(const Source& source) {
  if (source.address == nullptr) return false;
  std::uint64_t written = 0;
  for (const ByteRange& range : private_ranges(source.address, source.extent()))
    written += range.end - range.begin;
  return written > source.stored_bytes() / 2;
}

const char* where(const Source& source) {
  if (source.of_file && !mostly_written(source)) return "file";
  return source.pinned ? "pinned RAM" : "RAM";
}

/// What figures call all that has left the device of what autograd saved.
constexpr const char* kSavedTensors = "tensors saved for backward";

const char* detail(const Span& span) {
  switch (span.kind) {
    case Span::Kind::copy:
      return span.demanded ? "demanded" : "prefetched";
    case Span::Kind::wait:
      return name_of(span.cause);
    default:
      return "";
  }
}

const char* name_of(Span::Kind kind) {
  switch (kind) {
    case Span::Kind::copy:
      return "copy";
    case Span::Kind::copy_out:
      return "copy out";
    case Span::Kind::wait:
      return "wait";
    case Span::Kind::use:
      return "use";
    case Span::Kind::pass:
      return "pass";
  }
  return "";
}

/// Groups by when they were first used; those never used come last.
std::vector<std::uint32_t> order_of_use(const std::vector<Engine::GroupReport>& reports) {
  std::vector<std::uint32_t> order(reports.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return reports[a].first_use - 1 < reports[b].first_use - 1;  // 0 becomes the largest
  });
  return order;
}

}  // namespace

py::list Session::groups() const {
  const std::shared_ptr<const Plan> plan = plan_;
  const std::vector<Engine::GroupReport> reports = plan->engine->groups();
  const auto name_of_first = [&](std::uint32_t group) {
    if (group >= reports.size() || reports[group].short_lived) return std::string(kSavedTensors);
    return plan->weights[reports[group].weights.front()]->name;
  };
  py::list groups;
  for (const std::uint32_t index : order_of_use(reports)) {
    const Engine::GroupReport& report = reports[index];
    py::list names;
    if (report.short_lived) names.append(kSavedTensors);
    for (const WeightId id : report.weights) names.append(plan->weights[id]->name);
    const GroupFigures& figures = report.figures;
    py::dict causes;
    for (std::size_t i = 0; i < figures.stall_ns.size(); ++i)
      causes[name_of(static_cast<Cause>(i))] = figures.stall_ns[i];
    py::dict group;
    group["names"] = names;
    group["bytes"] = report.bytes;
    group["source"] =
        report.short_lived ? offload_->where() : where(*plan->engine->source(report.weights.front()));
    group["resident"] = report.resident;
    group["by_use"] = report.by_use;
    group["hits"] = figures.hits;
    group["late_hits"] = figures.late_hits;
    group["misses"] = figures.misses;
    group["copies"] = figures.copies;
    group["bytes_moved"] = figures.bytes_moved;
    group["copy_ns"] = figures.copies > 0 ? figures.copy_ns : figures.copy_ns.value_or(0);
    group["causes"] = causes;
    group["held_by"] = figures.held_by ? name_of_first(*figures.held_by) : std::string();
    groups.append(group);
  }
  return groups;
}

bool Session::stays(const Weight& weight) const {
  if (weight.path != Weight::AccessPath::wrapped && !sliced(weight))
    return weight.plan && weight.plan->engine->stays(weight.id);
  return std::all_of(weight.parts.begin(), weight.parts.end(),
                     [this](const auto& part) { return stays(*part.second); });
}

void Session::record(bool on) {
  recording_ = on;
  const std::shared_ptr<const Plan> plan = plan_;
  const py::gil_scoped_release release;
  plan->engine->record(on);
}

py::dict Session::timeline() const {
  Timeline timeline;
  std::vector<std::int64_t> place;  // of each group in groups()
  {
    const std::shared_ptr<const Plan> plan = plan_;
    const py::gil_scoped_release release;
    timeline = plan->engine->timeline();
    const std::vector<std::uint32_t> order = order_of_use(plan->engine->groups());
    place.resize(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) place[order[i]] = static_cast<std::int64_t>(i);
  }
  py::list spans;
  for (const Span& span : timeline.spans) {
    const std::size_t report = std::min<std::size_t>(span.group, place.size() - 1);  // the last: short-lived
    const std::int64_t group = span.kind == Span::Kind::pass ? -1 : place[report];
    spans.append(py::make_tuple(name_of(span.kind), group, span.when.begin, span.when.end, detail(span),
                                span.bytes, span.thread, span.saved_bytes));
  }
  py::dict out;
  out["spans"] = spans;
  out["dropped"] = timeline.dropped;
  out["clock"] = "monotonic";
  return out;
}

py::object Session::shared_out() const {
  if (!options_.ranks) return py::none();
  const GatheredCopies::Figures figures = options_.ranks->figures();
  py::dict out;
  out["passes"] = figures.passes;
  out["for_others"] = figures.for_others;
  out["order"] = figures.order;
  out["gathered"] = figures.gathered;
  out["unused"] = figures.unused;
  out["whole"] = figures.whole;
  out["received_bytes"] = figures.received_bytes;
  out["private_bytes"] = figures.private_bytes;
  out["whole_speed"] = figures.whole_speed;
  out["gather_speed"] = figures.gather_speed;
  out["why_not"] = figures.why_not;
  return out;
}

void Session::note_pass() {
  if (recording_) plan_->engine->note_pass(current_stream(options_.device));
}

void Session::announce_call(const py::object& self, const py::object& module) {
  if (capturing()) return note_pass();
  // In a backward, checkpointed parts of a forward run again: that is no pass.
  if (torch::autograd::get_current_graph_task_id() != -1 && !outdated_) return;
  if (options_.ranks) {
    {
      const py::gil_scoped_release release;
      options_.ranks->begin_pass();
    }
    if (const std::string said = options_.ranks->take_complaint(); !said.empty()) hooks_.warn(said);
  }
  const auto call = hooks_.call_begins(self, module).cast<std::uint32_t>();
  if (!to_pin_.empty()) pin_replaced();
  if (call != 0) plan_->engine->begin_call(call);
}

bool Session::note_graph_fetch(const Weight& weight) {
  if (inside_call_of(*this) || closed_ || abandoned_) return false;
  constexpr std::size_t kPasses = 4;
  if (++since_first_ > kPasses * table_->weights().size()) first_in_graph_ = 0;
  if (first_in_graph_ == 0) first_in_graph_ = weight.number;
  if (weight.number != first_in_graph_) return false;
  since_first_ = 0;
  call_begins();
  announce_call(py::cast(shared_from_this()), py::none());
  return true;
}

void Session::call_failed(const py::object& self, const py::error_already_set& error) {
  hooks_.call_failed(self, error.value());
}

py::dict Session::retune(const py::object& root, const Budget& budget) {
  read_whole_->ask_again();
  sim::Observed seen;
  const std::shared_ptr<const Plan> measured = plan_;
  PriorPlan plan = measured->engine->plan_for_reuse();
  std::optional<sim::Placement> placed;
  double before = 0;
  {
    const py::gil_scoped_release release;
    seen = sim::observe(measured->engine->timeline(), measured->engine->groups());
    if (budget.bytes && seen.passes > 0 && seen.pattern.bytes_per_second > 0) {
      try {
        before = sim::measure(seen.pattern, plan.resident, plan.cache_bytes,
                              measured->budget.bytes.value_or(0), options_.engine.prefetch);
        placed = sim::place_by_time(seen.pattern, *budget.bytes, options_.engine.prefetch);
      } catch (const BudgetError&) {
        // Smaller groups may fit: the engine forms them, and spreads residents evenly.
      }
    }
  }
  const auto passes = static_cast<double>(seen.passes);
  py::dict out;
  out["passes"] = seen.passes;
  out["compute_seconds"] = seen.compute_seconds;
  out["wait_seconds"] = seen.wait_seconds;
  out["bytes_per_second"] = seen.pattern.bytes_per_second;
  out["seconds_before"] = placed ? py::object(py::float_(before / passes)) : py::object(py::none());
  out["seconds_after"] = placed ? py::object(py::float_(placed->seconds / passes)) : py::object(py::none());
  if (placed) {
    plan.resident = placed->resident;
    plan.cache_bytes = placed->cache_bytes;
  }
  replace_plan(root, budget, placed ? std::optional(Placed{std::move(plan), measured}) : std::nullopt);
  return out;
}

}  // namespace dynswap
