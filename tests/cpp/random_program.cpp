#include "random_program.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/engine.h"
#include "fake_device.h"
#include "random.h"
#include "random_model.h"

namespace dynswap::test {

namespace {

/// A handed-out tensor that somebody keeps.
struct Kept {
  Lease lease;
  Expected expected;
  std::string what;
  std::set<Stream> streams;  ///< those that may read it
};

constexpr WeightId kAbsent = static_cast<WeightId>(-1);  ///< the plan does not have it

/// What this seed's program does. Each is absent in about half of the seeds.
struct Traits {
  double skip = 0;       ///< a module is a branch that is not taken
  double repeat = 0;     ///< a module is used again at once, or later in the pass
  double reorder = 0;    ///< the order changes between passes
  double probe = 0;      ///< a weight is acquired and not read
  double keep = 0;       ///< a lease is kept across modules and passes
  double second = 0;     ///< use_on() another stream
  double update = 0;     ///< a master is replaced
  double catch_up = 0;   ///< the user synchronises the device
  double give_way = 0;   ///< somebody runs out of memory
  double interlope = 0;  ///< another thread runs during a call of the backend
  unsigned failing_copies = 0;
  unsigned failing_allocations = 0;
  bool together = false;  ///< a module's weights are held at the same time
  bool strict = false;
  bool close_early = false;  ///< leases outlive Engine::close()
  std::size_t experts = 0;   ///< of eight units, those that are used without an order
  double announce = 0;       ///< some of these are expected before a module is used
  double replace = 0;        ///< another plan, with more weights or fewer, takes the plan's place
};

class Run {
 public:
  explicit Run(std::uint64_t seed)
      : random_(seed),
        model_(random_),
        device_(std::make_shared<FakeDevice>(random_.next(), std::size_t{16} << random_.below(4))),
        streams_(random_.between(1, 3)) {
    for (std::size_t i = 0; i < model_.modules.size(); ++i) order_.push_back(i);
    draw_traits();
  }

  std::vector<std::string> operator()() {
    if (!build()) return device_->violations();
    device_->set_interloper([this](Call call) { interlope(call); });
    be_quiet(false);
    try {
      const std::size_t passes = random_.between(2, 7);
      for (std::size_t pass = 0; pass < passes; ++pass) run_pass();
      finish();
    } catch (const Error& error) {
      device_->violation(std::string("the program was ended by: ") + error.what());
      be_quiet(true);  // what is left is let go without another thread
    }
    return device_->violations();
  }

 private:
  // ------------------------------------------------------------------------------------------- drawing

  void draw_traits() {
    const auto rate = [this](double most) { return random_.chance(0.5) ? most * random_.unit() : 0.0; };
    traits_.skip = rate(0.4);
    traits_.repeat = rate(0.3);
    traits_.reorder = rate(1);
    traits_.probe = rate(0.3);
    traits_.keep = rate(0.4);
    traits_.second = streams_ > 1 ? rate(0.6) : 0;
    traits_.update = rate(0.2);
    traits_.catch_up = rate(0.1);
    traits_.interlope = rate(0.2);
    traits_.failing_copies = random_.chance(0.3) ? static_cast<unsigned>(random_.between(1, 100)) : 0;
    traits_.failing_allocations = random_.chance(0.3) ? 200 : 0;
    traits_.together = random_.chance(0.7);
    traits_.strict = random_.chance(0.15);
    traits_.close_early = random_.chance(0.5);
    traits_.experts = random_.chance(0.5) ? random_.below(9) : 0;
    traits_.announce = traits_.experts > 0 ? rate(0.3) : 0;
    options_.prefetch = static_cast<std::uint32_t>(random_.below(5));
    options_.strict_budget = traits_.strict;
    traits_.give_way = rate(0.3);
    options_.residents_give_way = traits_.give_way > 0;
    options_.group_bytes = random_.chance(0.5) ? 0 : random_.below(2048);
    traits_.replace = rate(0.1);
    present_.assign(model_.units.size(), true);
  }

  // ------------------------------------------------------------------------------------------ building

  /// A plan in the making.
  struct Draft {
    std::shared_ptr<Engine> engine;
    std::vector<std::size_t> weights;       ///< by WeightId
    std::vector<std::uint32_t> versions;    ///< the same
    std::map<std::size_t, WeightId> id_of;  ///< by weight
  };

  Draft make_draft(const std::shared_ptr<FakeDevice>& device) {
    Draft draft{std::make_shared<Engine>(device->backend(), options_), {}, {}, {}};
    for (std::size_t unit = 0; unit < model_.units.size(); ++unit) {
      if (!present_[unit]) continue;
      for (const std::size_t i : model_.units[unit]) {
        draft.id_of[i] = draft.engine->add_weight(model_.weights[i].master, unit, {.by_use = by_use(unit)});
        draft.weights.push_back(i);
        draft.versions.push_back(model_.weights[i].version);
      }
    }
    return draft;
  }

  void begin_with(Draft draft) {
    engine_ = std::move(draft.engine);
    for (RandomModel::Weight& weight : model_.weights) weight.id = kAbsent;
    for (const auto& [index, id] : draft.id_of) model_.weights[index].id = id;
    in_plan_ = std::move(draft.weights);
  }

  std::shared_ptr<Engine> make_engine(const std::shared_ptr<FakeDevice>& device) {
    begin_with(make_draft(device));
    return engine_;
  }

  /// Draws a budget that works. The smallest that does is the engine's to name.
  bool build() {
    options_.budget = 1;
    std::size_t smallest = 0;
    const std::size_t alignment = device_->backend()->traits().alignment;
    try {
      make_engine(std::make_shared<FakeDevice>(0, alignment))->plan();
      device_->violation("a budget of one byte was accepted");
      return false;
    } catch (const BudgetError& error) {
      smallest = error.smallest_bytes();
    }
    const std::size_t total = model_.bytes() + model_.weights.size() * alignment;
    const std::size_t choice = random_.below(10);
    if (choice == 0) {
      options_.budget = 0;
    } else if (choice == 1) {
      options_.budget = 2 * total;
    } else if (choice == 2) {
      options_.budget = smallest;
    } else {
      options_.budget = smallest + random_.below(std::max(smallest, total - std::min(total, smallest)) + 1);
    }
    if (traits_.replace > 0) draw_present();
    make_engine(device_);
    if (options_.budget > 0) device_->set_cap(options_.budget);
    try {
      engine_->plan();
    } catch (const Error& error) {
      device_->violation(std::string("plan() refused a budget that should work: ") + error.what());
      return false;
    }
    device_->set_cap(static_cast<std::size_t>(-1));
    if (options_.residents_give_way) device_->set_caching();
    planned_bytes_ = device_->live_bytes();
    return true;
  }

  // ----------------------------------------------------------------------------------------- a program

  /// Some of the modules are experts.
  bool by_use(std::size_t unit) const { return unit % 8 < traits_.experts; }

  /// Announces weights of experts, some of which may not be used.
  void expect_some() {
    std::vector<WeightId> ids;
    for (std::size_t unit = 0; unit < model_.units.size(); ++unit) {
      if (!by_use(unit) || !present_[unit] || model_.units[unit].empty() || random_.chance(0.5)) continue;
      ids.push_back(model_.weights[model_.units[unit].front()].id);
    }
    engine_->expect(ids);
  }

  void run_pass() {
    if (random_.chance(traits_.reorder)) change_order();
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (random_.chance(traits_.announce)) expect_some();
      if (random_.chance(traits_.skip)) continue;
      use_module(model_.modules[order_[i]]);
      if (random_.chance(traits_.repeat)) use_module(model_.modules[order_[random_.below(i + 1)]]);
      if (random_.chance(traits_.catch_up)) device_->drain();
      if (random_.chance(traits_.update)) update(random_.below(model_.weights.size()));
      if (random_.chance(traits_.give_way)) run_out_of_memory();
      if (random_.chance(traits_.replace)) replace_plan();
      use_kept();
    }
  }

  /// Some units come, and some go.
  void draw_present() {
    for (std::size_t unit = 0; unit < present_.size(); ++unit) {
      if (random_.chance(0.2)) present_[unit] = random_.chance(0.7);
    }
    present_[0] = true;
  }

  /// As Session::replace_plan() does it: Note [A plan takes another's place].
  void replace_plan() {
    draw_present();
    const std::shared_ptr<Engine> old = engine_;
    Draft draft = make_draft(device_);
    std::vector<std::vector<WeightId>> on_device;
    for (const std::vector<WeightId>& group : old->residents_on_device()) {
      std::vector<WeightId>& ids = on_device.emplace_back();
      for (const WeightId id : group) {
        const auto found = draft.id_of.find(in_plan_[id]);
        if (found != draft.id_of.end()) ids.push_back(found->second);
      }
      if (ids.size() != group.size()) on_device.pop_back();
    }
    draft.engine->arrange(on_device);
    while (random_.chance(0.5)) do_something();  // other threads go on
    const bool cleared = kept_.empty() && random_.chance(0.5);
    if (cleared) {
      device_->drain();
      earlier_.clear();
    }

    std::vector<std::optional<WeightId>> ids;
    for (std::size_t id = 0; id < draft.weights.size(); ++id) {
      const RandomModel::Weight& weight = model_.weights[draft.weights[id]];
      const bool unchanged = weight.version == draft.versions[id] && weight.id != kAbsent;
      ids.push_back(unchanged ? std::optional(weight.id) : std::nullopt);
    }
    draft.engine->inherit(*old, ids);
    const bool was_quiet = quiet_;
    if (cleared) {
      be_quiet(true);
      if (options_.budget > 0) device_->set_cap(options_.budget);
    } else {
      passing_on_ = true;
      while (random_.chance(0.5)) do_something();  // with the old plan
      passing_on_ = false;
      be_quiet(true);
      device_->set_failures(0, traits_.failing_allocations);
    }
    earlier_.push_back(old);  // its last readers are queued: it frees what they read at the end
    old->close();
    device_->empty_cache();
    try {
      draft.engine->plan();
    } catch (const OutOfMemory&) {
      if (cleared || traits_.failing_allocations == 0) device_->violation("no memory for another plan");
      be_quiet(true);
      draft.engine->close();
      earlier_.push_back(draft.engine);
      draft = make_draft(device_);
      draft.engine->plan();
    }
    device_->set_cap(static_cast<std::size_t>(-1));
    for (std::size_t id = 0; id < draft.weights.size(); ++id) {
      const RandomModel::Weight& weight = model_.weights[draft.weights[id]];
      if (weight.version != draft.versions[id])
        draft.engine->update_source(static_cast<WeightId>(id), weight.master);
    }
    begin_with(std::move(draft));
    counted_ = false;
    const Stats stats = engine_->stats();
    planned_bytes_ = stats.arena_bytes + stats.resident_bytes;
    if (options_.budget > 0 && planned_bytes_ > options_.budget)
      device_->violation("another plan is over budget");
    be_quiet(was_quiet);
  }

  void do_something() {
    if (traits_.update > 0 && random_.chance(0.3)) {
      update(random_.below(model_.weights.size()));
    } else {
      use_module(model_.modules[random_.below(model_.modules.size())]);
    }
  }

  /// An allocation outside the engine, as Note [When torch's allocator asks] has it; other threads go on.
  void run_out_of_memory() {
    std::vector<Engine::Loan> loans = engine_->lend_residents();
    const std::size_t allocations = device_->allocations();
    const bool was_quiet = quiet_;
    while (random_.chance(0.5)) {
      if (traits_.update > 0 && random_.chance(0.5)) {
        update(random_.below(model_.weights.size()));
      } else {
        use_module(model_.modules[random_.below(model_.modules.size())]);
      }
    }
    be_quiet(true);
    if (device_->allocations() == allocations && random_.chance(0.7)) {
      engine_->take_back(std::move(loans));
    } else {
      engine_->give_up(loans);
    }
    be_quiet(was_quiet);
    device_->empty_cache();
  }

  void change_order() {
    const std::size_t first = random_.below(order_.size());
    const std::size_t last = random_.between(first, order_.size());
    std::reverse(order_.begin() + static_cast<std::ptrdiff_t>(first),
                 order_.begin() + static_cast<std::ptrdiff_t>(last));
  }

  /// A forward: takes the weights, launches kernels on them, lets go.
  void use_module(const RandomModel::Module& module) {
    const Stream stream = random_.below(streams_);
    std::vector<Kept> held;
    for (const std::size_t index : module) {
      if (model_.weights[index].id == kAbsent) continue;
      if (!traits_.together) held.clear();
      std::optional<Kept> tensor = take(index, stream, held);
      if (!tensor) continue;
      if (random_.chance(traits_.probe)) continue;
      launch(*tensor, stream);
      held.push_back(std::move(*tensor));
    }
    for (Kept& tensor : held) {
      if (random_.chance(0.5)) launch(tensor, stream);
      if (random_.chance(traits_.second)) read_elsewhere(tensor);
      if (random_.chance(traits_.keep)) kept_.push_back(std::move(tensor));
    }
  }

  void launch(const Kept& tensor, Stream stream) {
    device_->kernel(stream, tensor.lease.data(), tensor.expected, tensor.what);
  }

  void read_elsewhere(Kept& tensor) {
    const Stream stream = random_.below(streams_);
    tensor.lease.use_on(stream);
    tensor.streams.insert(stream);
    launch(tensor, stream);
  }

  /// Kept tensors are read again, on a stream that they were declared on, and let go in any order.
  void use_kept() {
    for (std::size_t i = 0; i < kept_.size();) {
      if (random_.chance(0.1)) {
        const auto& streams = kept_[i].streams;
        launch(kept_[i],
               *std::next(streams.begin(), static_cast<std::ptrdiff_t>(random_.below(streams.size()))));
      }
      if (random_.chance(0.08)) {
        drop_kept(i);
      } else {
        ++i;
      }
    }
  }

  void drop_kept(std::size_t i) {
    const Kept gone = std::move(kept_[i]);  // out of the list first: letting go may interlope
    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void drop_all_kept() {
    while (!kept_.empty()) drop_kept(kept_.size() - 1);
  }

  void update(std::size_t index) {
    if (being_taken_.count(index) > 0) return;
    model_.renew(index, random_);
    const RandomModel::Weight& weight = model_.weights[index];
    if (weight.id == kAbsent) return;
    if (random_.chance(0.5)) {
      engine_->update_source(weight.id, weight.master);
    } else {
      engine_->update_source_alone(weight.id, weight.master);
    }
  }

  /// An access. Errors have to be those that were provoked, and the next try has to work.
  std::optional<Kept> take(std::size_t index, Stream stream, std::vector<Kept>& held) {
    const RandomModel::Weight& weight = model_.weights[index];
    const bool outer = being_taken_.insert(index).second;
    std::optional<Lease> lease = try_acquire(weight, stream, held);
    if (outer) being_taken_.erase(index);
    if (!lease) return std::nullopt;
    return Kept{std::move(*lease),
                weight.expected,
                "weight " + std::to_string(index) + ", version " + std::to_string(weight.version) +
                    ", on stream " + std::to_string(stream),
                {stream}};
  }

  std::optional<Lease> try_acquire(const RandomModel::Weight& weight, Stream stream,
                                   std::vector<Kept>& held) {
    const bool was_quiet = quiet_;
    std::string error;
    std::optional<Lease> lease;
    // The third try: the second may still meet a prefetch that failed earlier.
    for (int attempt = 0; attempt < 3 && !lease; ++attempt) {
      if (attempt > 0) be_quiet(true);
      lease = attempt_acquire(weight, stream, held, error);
    }
    be_quiet(was_quiet);
    // A lease that the interrupted call holds may still be in the way of a strict budget.
    if (!lease && !passing_on_ && !(traits_.strict && engine_->stats().live_leases > 0)) {
      device_->violation("tried again in vain, after: " + error);
    }
    return lease;
  }

  std::optional<Lease> attempt_acquire(const RandomModel::Weight& weight, Stream stream,
                                       std::vector<Kept>& held, std::string& message) {
    const Stats before = engine_->stats();
    const std::size_t interruptions = interruptions_;
    try {
      // An access in a call asks for what is there first.
      if (Lease lease = engine_->acquire_present(weight.id, stream, /*in_order=*/true); lease) return lease;
      Lease lease = engine_->acquire(weight.id, stream);
      // What residents that gave way have left is in the budget, and outside the arena.
      const bool over_budget =
          traits_.give_way == 0 ? lease.overflows() : engine_->stats().overflow_bytes > before.overflow_bytes;
      if (before.live_leases == 0 && interruptions == interruptions_ && over_budget)
        device_->violation("over budget although nothing was held (Invariant 4)");
      return lease;
    } catch (const BudgetError& error) {
      message = error.what();
      if (!traits_.strict) device_->violation("without strict_budget: " + message);
      if (engine_->stats().live_leases == 0) device_->violation("nothing is held: " + message);
      held.clear();
      drop_all_kept();
    } catch (const ClosedError& error) {
      message = error.what();
      if (!passing_on_) device_->violation("an engine that is not closed says: " + message);
    } catch (const Error& error) {
      message = error.what();
      if (traits_.failing_copies == 0 && traits_.failing_allocations == 0) {
        device_->violation("an error for no reason: " + message);
      }
    }
    return std::nullopt;
  }

  /// Quiet: nothing fails, and no other thread runs.
  void be_quiet(bool quiet) {
    quiet_ = quiet;
    device_->set_failures(quiet ? 0 : traits_.failing_copies, quiet ? 0 : traits_.failing_allocations);
  }

  /// What another thread might do while the engine calls the backend. While a copy is being issued it takes
  /// no weight: it could have to wait for this very thread.
  void interlope(Call call) {
    if (quiet_ || interloping_ || !random_.chance(traits_.interlope)) return;
    interloping_ = true;
    ++interruptions_;
    if (call == Call::wait || call == Call::record) {
      const std::size_t n = random_.between(1, 3);
      for (std::size_t i = 0; i < n; ++i) use_module(model_.modules[random_.below(model_.modules.size())]);
    } else if (!kept_.empty() && random_.chance(0.5)) {
      drop_kept(random_.below(kept_.size()));
    } else if (random_.chance(traits_.give_way)) {
      run_out_of_memory_at_once();
    } else if (traits_.update > 0) {
      update(random_.below(model_.weights.size()));
    }
    interloping_ = false;
  }

  void run_out_of_memory_at_once() {
    engine_->give_up(engine_->lend_residents());
    device_->empty_cache();
  }

  // ----------------------------------------------------------------------------------------- the ending

  void finish() {
    be_quiet(true);
    if (traits_.close_early) {
      check_counts(engine_->stats());
      engine_->close();
      use_kept();
      drop_all_kept();
    } else {
      drop_all_kept();
      device_->drain();
      earlier_.clear();
      check_nothing_left_over();
      check_counts(engine_->stats());
    }
    const std::weak_ptr<Engine> weak = engine_;
    engine_.reset();
    device_->drain();
    earlier_.clear();
    device_->empty_cache();
    if (!weak.expired()) device_->violation("the engine is kept alive although nobody holds a lease");
    device_->drain();
    if (device_->live_bytes() > 0) {
      device_->violation(std::to_string(device_->live_bytes()) + " bytes of device memory are never freed");
    }
  }

  void check_counts(const Stats& stats) {
    const auto kept = static_cast<std::size_t>(std::count_if(
        kept_.begin(), kept_.end(), [this](const Kept& tensor) { return tensor.lease.from(*engine_); }));
    if (stats.live_leases != kept) {
      device_->violation(std::to_string(stats.live_leases) + " live leases, not " + std::to_string(kept));
    }
    if (stats.host_synchronisations > 0) device_->violation("the host was made to wait (Invariant 3)");
    if (options_.budget > 0 && planned_bytes_ > options_.budget)
      device_->violation("the plan is over budget");
    if (traits_.give_way > 0) return check_counts_of_loans(stats);
    if (stats.arena_bytes + stats.resident_bytes != planned_bytes_) {
      device_->violation("the statistics tell another size than was allocated");
    }
    if (!counted_) return;
    if (device_->peak_bytes() > std::max(planned_bytes_, options_.budget) + stats.overflow_bytes) {
      device_->violation("more device memory than the budget and the overflow");
    }
    if (device_->peak_bytes() > stats.peak_bytes) {
      device_->violation("peak_bytes is " + std::to_string(stats.peak_bytes) + ", but " +
                         std::to_string(device_->peak_bytes()) + " bytes were held");
    }
  }

  void check_counts_of_loans(const Stats& stats) {
    const std::size_t lost = planned_bytes_ - stats.arena_bytes - stats.resident_bytes;
    if (lost != stats.given_way_bytes)
      device_->violation(std::to_string(lost) + " bytes of residents are gone, of which " +
                         std::to_string(stats.given_way_bytes) + " are known to have given way");
  }

  /// Memory outside the budget goes when its last lease has gone and its readers are done.
  void check_nothing_left_over() {
    // The engine frees when it is called: two accesses, the second after all has run.
    for (const std::size_t index : {in_plan_.front(), in_plan_.back()}) {
      std::vector<Kept> none;
      take(index, 0, none);
      device_->drain();
    }
    if (engine_->stats().live_leases != 0) device_->violation("a lease is counted that nobody holds");
    const Stats stats = engine_->stats();
    const std::size_t planned = stats.arena_bytes + stats.resident_bytes;
    if (device_->live_bytes() > planned) {
      device_->violation(std::to_string(device_->live_bytes() - planned) +
                         " bytes outside the budget although nothing is held (Invariant 4)");
    }
  }

  Random random_;
  RandomModel model_;  ///< before the device: queued copies read its buffers
  Traits traits_;
  EngineOptions options_;
  std::shared_ptr<FakeDevice> device_;
  std::vector<std::size_t> order_;
  std::size_t streams_;
  std::size_t planned_bytes_ = 0;
  bool counted_ = true;               ///< what was ever allocated is one plan's, or overflow
  std::vector<bool> present_;         ///< units that are in the next plan
  std::vector<std::size_t> in_plan_;  ///< weights, by WeightId
  bool quiet_ = false;
  bool passing_on_ = false;   ///< the next plan has residents of this one
  bool interloping_ = false;  ///< the other thread is running
  std::size_t interruptions_ = 0;
  std::set<std::size_t> being_taken_;
  std::vector<std::shared_ptr<Engine>> earlier_;  ///< closed
  std::shared_ptr<Engine> engine_;
  std::vector<Kept> kept_;  ///< declared last: let go first
};

}  // namespace

std::vector<std::string> run_random_program(std::uint64_t seed) { return Run(seed)(); }

}  // namespace dynswap::test
