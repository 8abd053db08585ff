#include "core/engine.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/protection.h"

namespace dynswap {

// ---------------------------------------------------------------------------------------------- Lease

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    engine_ = std::move(other.engine_);
    copy_ = std::move(other.copy_);
    part_ = other.part_;
    data_ = std::exchange(other.data_, nullptr);
    left_ = std::move(other.left_);
  }
  return *this;
}

void Lease::use_on(Stream consumer) { engine_->use_on(copy_, consumer); }

void Lease::add_reader(Stream consumer) {
  const std::lock_guard lock(engine_->mutex_);
  copy_->add_reader(consumer);
}

bool Lease::overflows() const noexcept { return copy_ && copy_->place == Place::overflow; }

void Lease::release() noexcept { release(nullptr); }

void Lease::release(std::shared_ptr<void> what) noexcept {
  left_.reset();
  if (!copy_) return;
  engine_->release(copy_, part_, std::move(what));
  copy_.reset();
  engine_.reset();
  data_ = nullptr;
}

// --------------------------------------------------------------------------------------------- Engine

Engine::Engine(std::unique_ptr<Backend> backend, EngineOptions options,
               std::function<void(const std::string&)> warn)
    : backend_(std::move(backend)),
      options_(std::move(options)),
      warn_(std::move(warn)),
      layout_(std::make_unique<Layout>(options_, backend_->traits())) {
  register_engine();
}

Engine::~Engine() {
  unregister_engine();
  if (abandoned_) {
    // This is a forked child, and threads and device are the parent's: what refers to them is leaked. So are
    // copies and events, in which a thread of the backend may have been at work.
    static_cast<void>(backend_.release());
    new Memory(std::move(arena_memory_));
    new Memory(std::move(cache_memory_));
    new auto(std::move(retired_));
    new auto(std::move(groups_));
    new auto(std::move(arena_));
    new auto(std::move(cache_));
    new auto(std::move(postponed_));
    new auto(std::move(latest_copy_));
    return;
  }
  close();
  release_postponed();
  for (const Retired& retired : retired_) {
    for (const EventPtr& event : retired.after) backend_->synchronise(event);
  }
}

namespace {

/// Whether the copy is issued, and later work of `consumer` is ordered after it.
bool is_there(const DeviceCopy& copy, Stream consumer) {
  return copy.state == DeviceCopy::State::issued && copy.has_waited(consumer);
}

}  // namespace

void Engine::begin_call(std::uint32_t call) {
  const std::lock_guard lock(mutex_);
  schedule_.begin_call(consumer_of(std::this_thread::get_id()).cursor, call);
}

Lease Engine::acquire(WeightId id, Stream consumer, Use use) {
  if (abandoned_) refuse_in_child();
  if (any_postponed_) release_postponed();
  std::vector<Planned> planned;
  std::string warning;
  const EventPtr present = use.after_consumer ? backend_->record(consumer) : nullptr;
  bool hit = false;
  bool ordered = false;
  Lease lease;
  {
    std::unique_lock lock(mutex_);
    DYNSWAP_CHECK(planned_, "there is no plan");
    const GroupId group_id = weights_[id].group;
    Group& group = groups_[group_id];
    std::optional<Planned> renewal;
    do {
      if (!issued_.wait(lock, [&] { return closed_ || !waits_for_others(group); })) refuse_in_child();
      renewal = renew_outdated(id, lock);
    } while (!closed_ && !renewal && waits_for_others(group));
    if (closed_) throw ClosedError("the model has been uninstalled");
    if (group.inherited_by_next) throw ClosedError("the next plan has the resident");
    ++tick_;
    group.expected_at = tick_;
    if (group.first_use == 0) group.first_use = tick_;
    Consumer& at = consumer_of(use.thread);
    bool moved = false;
    if (use.in_order && group.by_use) {
      moved = use_order_.observe(at.by_use, group_id);
      group.score.add(uses_ += 1 / half_life_);
    } else if (use.in_order && !group.home) {
      // Residents are no part of the order: the fast path hands them out without asking the engine.
      moved = schedule_.observe(at.cursor, group_id);
    }
    hit = group.copy != nullptr && !renewal;
    if (!hit) {
      planned.push_back(renewal ? std::move(*renewal) : plan_copy(group_id, /*demanded=*/true));
      if (present && group.resident) {
        for (Arena::Region& region : planned.back().displaced) region.after.push_back(present);
      }
      ++stats_.misses;
      ++group.figures.misses;
      const bool over_budget =
          group.copy->place == Place::overflow && options_.budget > 0 && beyond_budget() > 0;
      if (over_budget && !std::exchange(warned_, true)) {
        const std::size_t needed = options_.budget + beyond_budget();
        warning =
            why_full() +
            ": memory outside the budget is used until they are let go (overflow_bytes in the statistics). " +
            "To avoid that, " + remedy(needed) + "; or pass strict_budget=True to raise instead";
      }
    } else if (moved || group.by_use || !group.copy->read) {
      ++stats_.hits;
      ++group.figures.hits;
    }
    lease = lease_on(id, consumer);
    ordered = is_there(*lease.copy_, consumer);
    if (options_.prefetch > 0 && use.in_order && (moved || !hit)) {
      if (group.by_use) {
        look_ahead_by_use(at.by_use, planned);
      } else {
        look_ahead(at.cursor, group_id, planned);
      }
    }
  }
  if (!planned.empty()) issue(planned);
  if (!ordered) order_after_copy(lease.copy_, consumer, hit);
  if (recorder_.on()) note_use(id, consumer);
  lease.data_ = lease.copy_->base + weights_[id].offset;
  if (!warning.empty() && warn_) warn_(warning);  // last: the user may have made an error of it
  return lease;
}

Lease Engine::acquire_present(WeightId id, Stream consumer, bool in_order) {
  if (abandoned_ || any_postponed_ || recorder_.on()) return {};
  const std::lock_guard lock(mutex_);
  if (closed_ || !planned_) return {};
  const GroupId group_id = weights_[id].group;
  Group& group = groups_[group_id];
  const DeviceCopy* const copy = group.copy.get();
  if (copy == nullptr || !copy->read || !is_there(*copy, consumer)) return {};
  if (copy->parts[weights_[id].part].outdated) return {};
  if (in_order && group.by_use) return {};
  if (in_order && !group.home && consumer_of(std::this_thread::get_id()).cursor.current() != group_id)
    return {};
  ++tick_;
  group.expected_at = tick_;
  Lease lease = lease_on(id, consumer);
  lease.data_ = copy->base + weights_[id].offset;
  return lease;
}

void Engine::expect(const std::vector<WeightId>& weights) {
  if (abandoned_ || options_.prefetch == 0) return;
  if (!weights.empty()) time_guesses(weights_[weights.front()].group);
  std::vector<Planned> planned;
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || !planned_) return;
    told_at_ = ++tick_;
    const Arena::Rank rank = [this](const DeviceCopy& copy) {
      return groups_[copy.group].expected_at == tick_ ? std::nullopt : may_go(copy);
    };
    for (const WeightId id : weights) groups_[weights_[id].group].expected_at = tick_;
    for (const WeightId id : weights) {
      Group& group = groups_[weights_[id].group];
      DYNSWAP_CHECK(group.by_use, "groups in an order are fetched ahead by the schedule");
      if (group.copy) continue;
      if (!prefetch(weights_[id].group, rank, planned)) break;
    }
  }
  if (!planned.empty()) issue(planned);
}

std::shared_ptr<void> Engine::count_outside(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  overflow_now_ += bytes;
  note_peak();
  return {nullptr, [engine = shared_from_this(), bytes](void*) {
            const std::lock_guard guard(engine->mutex_);
            engine->overflow_now_ -= bytes;
          }};
}

void Engine::bring_residents() {
  std::vector<Planned> planned;
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || !planned_ || abandoned_) return;
    for (GroupId id = 0; id < groups_.size() && cold_residents_ > 0; ++id) {
      bring_resident(id, planned);
    }
  }
  if (!planned.empty()) issue(planned);
}

/// A lease on the current copy of the weight's group, which may not be issued yet. LOCK: mutex_ is held.
Lease Engine::lease_on(WeightId id, Stream consumer) {
  const Weight& weight = weights_[id];
  Lease lease;
  lease.engine_ = shared_from_this();
  lease.copy_ = groups_[weight.group].copy;
  lease.part_ = weight.part;
  DeviceCopy& copy = *lease.copy_;
  DeviceCopy::Part& part = copy.parts[weight.part];
  copy.last_use = tick_;
  copy.read = true;
  copy.add_reader(consumer);
  ++copy.leases;
  ++part.leases;
  ++stats_.live_leases;
  lease.left_ = std::move(part.left);
  return lease;
}

void Engine::exchange_source(Weight& weight, SourcePtr& source) {
  DYNSWAP_CHECK(source->count == weight.source->count && source->stored == weight.source->stored &&
                    source->wanted == weight.source->wanted,
                "the new master of " << source->name << " has another size or type");
  // The caller lets go of the old one without the lock: its memory may have to be unlocked and freed.
  weight.source.swap(source);
}

void Engine::replace_source(WeightId id, SourcePtr source) {
  const std::lock_guard lock(mutex_);
  exchange_source(weights_[id], source);
}

void Engine::update_source(WeightId id, SourcePtr source) {
  const std::lock_guard lock(mutex_);
  if (const auto copy = outdate(id, source)) detach(copy);
}

void Engine::update_source_alone(WeightId id, SourcePtr source) {
  const std::lock_guard lock(mutex_);
  const auto copy = outdate(id, source);
  if (!copy) return;
  copy->parts[weights_[id].part].outdated = true;
  if (copy->leases == 0) detach(copy);
}

/// Sets the new source, and returns the copy that has the old bytes; null if there is none.
std::shared_ptr<DeviceCopy> Engine::outdate(WeightId id, SourcePtr& source) {
  exchange_source(weights_[id], source);
  Group& group = groups_[weights_[id].group];
  ++group.changes;
  if (!group.copy || !PROTECTED(stale_copy_refused)) return nullptr;
  ++stats_.refetches;
  group.held_back = Cause::master_changed;
  return group.copy;
}

SourcePtr Engine::source(WeightId id) const {
  const std::lock_guard lock(mutex_);
  return weights_[id].source;
}

bool Engine::resident(WeightId id) const { return groups_[weights_[id].group].resident; }

bool Engine::stays(WeightId id) const {
  const std::lock_guard lock(mutex_);
  return groups_[weights_[id].group].home != nullptr;
}

bool Engine::keep_from_giving_way(WeightId id) {
  const std::lock_guard lock(mutex_);
  Group& group = groups_[weights_[id].group];
  const bool there = group.home && group.copy && group.copy == group.home_occupant &&
                     group.copy->state == DeviceCopy::State::issued;
  group.captured = group.captured || there;
  return there;
}

const std::vector<WeightId>& Engine::companions(WeightId id) const {
  return groups_[weights_[id].group].weights;
}

std::pair<std::uint32_t, std::uint32_t> Engine::leases(WeightId id) const {
  const std::lock_guard lock(mutex_);
  const DeviceCopy* const copy = groups_[weights_[id].group].copy.get();
  if (copy == nullptr) return {0, 0};
  return {copy->leases, copy->parts[weights_[id].part].leases};
}

void Engine::close() noexcept {
  if (abandoned_) return;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  backend_->close();
  release_postponed();
  // What leases still hold keeps its memory through the copy; the rest goes here, after its readers.
  std::vector<std::shared_ptr<DeviceCopy>> copies;
  std::vector<SourcePtr> sources;
  {
    const std::lock_guard lock(mutex_);
    std::vector<EventPtr> after;
    const auto keep_until_read = [&](const DeviceCopy& copy) {
      for (EventPtr& event : overwrite_after(copy)) after.push_back(std::move(event));
    };
    for (const Arena* const arena : {&arena_, &cache_}) {
      for (const Arena::Region& region : arena->regions()) {
        after.insert(after.end(), region.after.begin(), region.after.end());
        if (region.occupant) keep_until_read(*region.occupant);
      }
    }
    for (Group& group : groups_) {
      if (group.home) {  // it goes with its own readers
        std::vector<EventPtr> read;
        if (group.home_occupant) read = overwrite_after(*group.home_occupant);
        retired_.push_back({group.home, std::move(read), 0, true});
      }
      group.resident = group.home != nullptr;  // for reports: as it was at the end
      group.home.reset();
      copies.push_back(std::move(group.home_occupant));
      if (group.copy) {
        const std::shared_ptr<DeviceCopy> copy = group.copy;
        detach(copy);
        copies.push_back(copy);
      }
    }
    arena_ = Arena();
    cache_ = Arena();
    for (Retired& retired : retired_) retired.at_once = true;
    retired_.push_back({std::move(arena_memory_), after, 0, true});
    retired_.push_back({std::move(cache_memory_), std::move(after), 0, true});
    // Leases may keep the engine; the masters' memory is their owners' again.
    for (Weight& weight : weights_) {
      sources.push_back(weight.source);
      weight.source = without_bytes(*weight.source);
    }
  }
  free_retired();
}

bool Engine::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

}  // namespace dynswap
