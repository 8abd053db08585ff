// Session: plans are drafted.
#include <mutex>
#include <unordered_set>
#include <utility>

#include "accelerator/backends.h"
#include "accelerator/plain_torch.h"
#include "accelerator/torch_stream.h"
#include "platform/fork_safe.h"
#include "session/draft.h"
#include "session/module_state.h"

namespace dynswap {

/// One plan at a time, for as long as this lives. Waits without the GIL.
struct Session::Planning {
  explicit Planning(Session& of) : session(of), one_at_a_time(of.planning_mutex_, std::defer_lock) {
    {
      const py::gil_scoped_release release;
      one_at_a_time.lock();
    }
    session.planning_ = std::this_thread::get_id();
  }
  Planning(const Planning&) = delete;
  Planning& operator=(const Planning&) = delete;
  ~Planning() { session.planning_.reset(); }

  Session& session;
  std::unique_lock<Mutex> one_at_a_time;
};

std::shared_ptr<WeightTable> Session::new_table() const {
  return std::make_shared<WeightTable>(
      WeightTable::Settings{device(), dtype(), pinned_copies_, options_.keep, read_whole_}, hooks_);
}

std::shared_ptr<Engine> Session::new_engine(const Budget& budget, std::optional<PriorPlan> prior) {
  const auto warn = [this](const std::string& message) {
    const py::gil_scoped_acquire gil;
    hooks_.warn(message);
  };
  auto backend = make_backend(device(), wanted_backend_, warn);
  backend_ = backend->name();
  if (options_.ranks) backend = options_.ranks->around(std::move(backend));
  EngineOptions options = options_.engine;
  options.budget = budget.bytes.value_or(0);
  options.short_lived_bytes = budget.activations.value_or(0);
  options.residents_give_way = budget.automatic && !device().is_cpu();
  options.prior = std::move(prior);
  return std::make_shared<Engine>(std::move(backend), options, warn);
}

namespace {

/// Whether a plan that was measured with other weights applies to these: their masters are the same, in the
/// same order.
bool applies_to(const Plan& plan, const WeightTable::Streamed& streamed) {
  if (plan.weights.size() != streamed.first.size()) return false;
  for (std::size_t i = 0; i < streamed.first.size(); ++i) {
    const Weight &old = *plan.weights[i], &now = *streamed.first[i].first;
    if (old.state.impl != now.state.impl || !old.source || !old.source->same_shape(*now.source)) return false;
  }
  return true;
}

/// Whether a module has a parameter of three dimensions or more, whose slices may be experts. So may be those
/// of a parameter that only Python can be asked about.
bool has_stacked(PyObject* module_dict) {
  PyObject* const parameters = PyDict_GetItemWithError(module_dict, Names::get().parameters);
  if (parameters == nullptr || !PyDict_Check(parameters)) return false;
  PyObject *name = nullptr, *master = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(parameters, &at, &name, &master) != 0;) {
    if (!THPVariable_Check(master)) continue;
    const c10::TensorImpl& impl = *THPVariable_Unpack(master).unsafeGetTensorImpl();
    if (!has_layout(impl) || impl.dim() >= 3) return true;
  }
  return false;
}

/// Registers the weights, and tells them by which ids.
void add_weights(Engine& engine, const WeightTable::Streamed& streamed, const GatheredCopies* ranks) {
  for (const auto& [weight, unit] : streamed.first) {
    WeightOptions options = unit.options;
    options.of_this_rank = ranks != nullptr && !ranks->may_gather(*weight->source);
    weight->id = engine.add_weight(weight->source, unit.number, options);
  }
  for (const auto& [weight, unit] : streamed.again)
    engine.share_weight(weight->id, unit.number, unit.options);
}

}  // namespace

WeightTable::Streamed Session::find_weights(const Served& served, WeightTable& table) {
  std::size_t masters = 0;
  for (const Served::Module& module : served.modules) masters += module.entries->size();
  table.expect(masters);
  MappingsOfMasters mappings;
  Streamed streamed;
  for (const Served::Module& module : served.modules) {
    table.find_weights(module.dict.ptr(), module.prefix, served.choices[module.place], mappings,
                       *module.entries, streamed);
  }
  return streamed;
}

/// What is used in no order (Note [Groups by use]), by the modules' places.
py::dict Session::experts_in(const Served& served) const {
  py::list stacked;
  for (const Served::Module& module : served.modules) {
    if (has_stacked(module.dict.ptr())) stacked.append(module.place);
  }
  return served.request.attr("experts")(stacked);
}

void Session::tell_experts_apart(Served& served, const py::dict& experts) {
  for (const auto& [place, what] : experts) {
    const auto [slices, expert] = what.cast<std::pair<std::int64_t, std::int64_t>>();
    WeightTable::Unit& unit = served.choices.at(place.cast<std::size_t>()).unit;
    unit.slices = slices;
    if (expert < 0) continue;
    unit.number = static_cast<std::uint64_t>(expert);
    unit.options.by_use = true;
  }
}

/// Whether all weights can stay on the device, as an engine would lay them out.
bool Session::holds_all(const Streamed& streamed, const Budget& budget) {
  if (!budget.bytes) return false;
  const std::shared_ptr<Engine> engine = new_engine(budget);
  add_weights(*engine, streamed, options_.ranks.get());
  return engine->holds_all();
}

/// Finds the weights of the draft. Experts are told apart only where not all weights can stay on the device:
/// else none is used in another way than others.
void Session::draft_weights(Draft& draft, Served& served) {
  if (const py::dict experts = experts_in(served); !experts.empty()) {
    draft.table = new_table();
    draft.streamed = find_weights(served, *draft.table);
    if (holds_all(draft.streamed, draft.plan->budget)) return;
    tell_experts_apart(served, experts);
  }
  draft.table = new_table();
  draft.streamed = find_weights(served, *draft.table);
}

std::string Session::draft_first(Served& served, const std::optional<SavedPlan>& saved) {
  draft_ = std::make_shared<Draft>(plan_->budget);
  draft_weights(*draft_, served);
  draft_->before = std::exchange(table_, draft_->table);
  if (!saved) {
    draft_->plan->engine = plan_->engine;
    draft_plan(*draft_, {});
    return "";
  }
  std::string difference = saved->difference_from(draft_->streamed);
  if (difference.empty()) {
    PriorPlan plan = saved->plan();
    if (!draft_->plan->budget.bytes) plan.resident.clear();  // its groups are the usual ones
    draft_plan(*draft_, Placed{std::move(plan), nullptr});
  }
  return difference;
}

/// Calls that begin once the modules are served wait for this plan, should they ask for another.
void Session::plan_first(const std::function<void()>& swap) {
  const std::shared_ptr<Session> self = shared_from_this();
  const std::shared_ptr<Draft> draft = std::move(draft_);
  const Planning planning(*this);
  swap();
  if (!closed_) carry_out(*draft);
}

void Session::replan(const py::object& root, const Budget& budget) {
  for (;;) {
    ReadWhole::Set whole = read_whole_->all();
    try {
      replace_plan(root, budget);
      read_whole_->plan_holds(std::move(whole));
      return;
    } catch (const BudgetError& error) {
      if (!serve_largest_by_slices(error)) throw;
    }
  }
}

py::dict Session::saved_plan() {
  const Planning planning(*this);
  if (!plan_->engine->planned()) throw py::value_error("the plan has no memory on the device now");
  if (!read_whole_->all().empty())
    throw py::value_error(
        "an operation reads all experts of a parameter at once, which each process has to see before it "
        "plans");
  WeightTable::Streamed streamed;
  for (const auto& weight : plan_->weights) streamed.first.emplace_back(weight.get(), WeightTable::Unit());
  return SavedPlan(streamed, plan_->engine->plan_for_reuse()).as_dict();
}

void Session::release_memory(const py::object& root) {
  replace_plan(root, plan_->budget, {}, /*takes_memory=*/false);
}

void Session::bring_residents() {
  const std::shared_ptr<const Plan> plan = plan_;
  const py::gil_scoped_release release;
  plan->engine->bring_residents();
}

void Session::replace_plan(const py::object& root, const Budget& budget, const std::optional<Placed>& placed,
                           bool takes_memory) {
  const std::shared_ptr<Session> self = shared_from_this();
  // A forked child makes no plans: its engines are the parent's. Nor does a session make one before its
  // first.
  if (abandoned_ || closed_ || modules_ == 0) return;
  if (planning_ == std::this_thread::get_id()) return;  // called from code that planning runs
  const Planning planning(*this);
  if (closed_) return;
  flush();
  outdated_ = false;
  Draft draft(budget);
  const std::vector<Visited> found = modules_of(root.ptr());
  Served served = requested(list_of(found));
  for (std::size_t place = 0; place < found.size(); ++place) {
    const Visited& visited = found[place];
    const ModuleView view(visited.module.ptr());
    ModuleState* const state = view.state;
    if (state == nullptr || state->session->get() != this) continue;
    Draft::Module& module = draft.modules.emplace_back();
    module.state = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(state));
    for (const Entry& entry : *state->entries)
      module.entries.push_back({entry.name, entry.parameter, nullptr, entry.casting, entry.ignored});
    served.modules.push_back({view.dict, visited.prefix, place, nullptr});
  }
  for (std::size_t i = 0; i < served.modules.size(); ++i)
    served.modules[i].entries = &draft.modules[i].entries;
  draft_weights(draft, served);
  draft_plan(draft, placed, takes_memory);
  if (closed_) return;  // another thread has closed it meanwhile
  take_over(draft);
  takes_memory ? carry_out(draft) : put_down(draft);
}

/// Does all planning that needs no device memory; releases the GIL. Throws BudgetError.
void Session::draft_plan(Draft& draft, const std::optional<Placed>& placed, bool takes_memory) {
  std::vector<Weight*> weights;
  for (const auto& [weight, unit] : draft.streamed.first) weights.push_back(weight);
  pin(*draft.table, weights);
  if (closed_) return;
  if (!draft.plan->engine) {
    std::optional<PriorPlan> prior;
    if (placed && (!placed->measured || applies_to(*placed->measured, draft.streamed))) prior = placed->plan;
    draft.plan->engine = new_engine(draft.plan->budget, std::move(prior));
  }
  add_weights(*draft.plan->engine, draft.streamed, options_.ranks.get());
  for (Weight* const weight : weights) draft.plan->weights.push_back(weight->shared_from_this());
  const std::vector<std::vector<WeightId>> on_device = residents_on_device(draft);
  const py::gil_scoped_release release;
  try {
    draft.plan->engine->arrange(on_device);
  } catch (const BudgetError&) {
    if (takes_memory) throw;  // else it is for the plan that does to be refused
  }
}

/// The residents of the present plan that are on the device, as far as the draft has all of their weights.
std::vector<std::vector<WeightId>> Session::residents_on_device(const Draft& draft) const {
  std::vector<std::vector<WeightId>> on_device;
  if (plan_->engine == draft.plan->engine) return on_device;
  std::unordered_set<WeightId>
      taken;  // two weights of a plan may have become one: masters that were tied since
  for (const std::vector<WeightId>& group : plan_->engine->residents_on_device()) {
    std::vector<WeightId>& ids = on_device.emplace_back();
    for (const WeightId id : group) {
      const Weight& earlier = *plan_->weights[id];
      const Weight* const weight = draft.table->find(earlier.state.impl);
      if (weight != nullptr && same_device_bytes(earlier, *weight) && !taken.contains(weight->id))
        ids.push_back(weight->id);
    }
    const std::unordered_set<WeightId> distinct(ids.begin(), ids.end());
    if (distinct.size() == group.size()) {
      taken.insert(ids.begin(), ids.end());
    } else {
      on_device.pop_back();
    }
  }
  return on_device;
}

}  // namespace dynswap
