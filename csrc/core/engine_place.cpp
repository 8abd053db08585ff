// Engine: what is copied next, and where to. All of it runs under the engine's mutex and touches no device.
#include "core/engine.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "core/amount.h"
#include "core/protection.h"

namespace dynswap {

namespace {

constexpr std::size_t kMostConsumers = 16;  ///< threads whose place in the schedule is remembered
constexpr std::size_t kMostAhead = 64;      ///< groups; the arena is the real limit

bool evictable(const DeviceCopy& copy) noexcept {
  if (!PROTECTED(lease_blocks_eviction)) return copy.state != DeviceCopy::State::issuing;
  return copy.evictable();
}

}  // namespace

/// How willingly an arena gives up a copy that no lease holds. What has been read goes first, the longest
/// unused before others: in a cyclic order it is needed last. Of groups by use, the least used goes before
/// others. What was fetched ahead and not read yet is needed soon: of that, the latest goes first.
std::uint64_t Engine::willingness(const DeviceCopy& copy) const noexcept {
  constexpr std::uint64_t kRead = std::uint64_t{1} << 62;
  if (!copy.read) return copy.last_use;
  const Group& group = groups_[copy.group];
  return kRead + (kRead - 1 - (group.by_use ? group.score.rank() : copy.last_use));
}

std::optional<std::uint64_t> Engine::may_go(const DeviceCopy& copy) const noexcept {
  return evictable(copy) ? std::optional(willingness(copy)) : std::nullopt;
}

Engine::Consumer& Engine::consumer_of(std::thread::id thread) {
  auto oldest = consumers_.begin();
  for (auto it = consumers_.begin(); it != consumers_.end(); ++it) {
    if (it->thread == thread) {
      it->last_use = tick_;
      return *it;
    }
    if (it->last_use < oldest->last_use) oldest = it;
  }
  if (consumers_.size() < kMostConsumers) {
    consumers_.push_back({thread, {}, {}, tick_});
    return consumers_.back();
  }
  *oldest = {thread, {}, {}, tick_};
  return *oldest;
}

/// Whether a group has no room now, and will have once other threads have issued what they are bringing: a
/// copy gives its place up only then.
bool Engine::waits_for_others(const Group& group) const {
  if (group.copy || group.home || group.short_lived) return false;
  const auto is_issued = [](const Arena::Region& region) {
    return !region.occupant || region.occupant->state != DeviceCopy::State::issuing;
  };
  const Arena& arena = arena_of(group);
  const std::vector<Arena::Region>& regions = arena.regions();
  if (std::all_of(regions.begin(), regions.end(), is_issued)) return false;
  return !arena.has_room(group.bytes, [this](const DeviceCopy& copy) { return may_go(copy); });
}

std::optional<Cause> Engine::why_so_late(Group& group) const noexcept {
  // Without prefetch, every copy is as late as it can be.
  const auto next_time = options_.prefetch == 0 ? std::optional(Cause::late_prefetch) : std::nullopt;
  return std::exchange(group.held_back, next_time);
}

Engine::Planned Engine::plan_copy(GroupId id, bool demanded) {
  Group& group = groups_[id];
  Planned planned;
  planned.demanded = demanded;
  planned.copy = std::make_shared<DeviceCopy>();
  planned.copy->group = id;
  planned.copy->bytes = group.bytes;
  planned.copy->parts.resize(group.weights.size());
  planned.copy->last_use = tick_;
  planned.copy->held_back = why_so_late(group);
  for (const WeightId weight : group.weights) planned.sources.push_back(weights_[weight].source);
  if (group.short_lived) place_beside(planned);
  if (!demanded) return planned;  // look_ahead places it, or gives it up

  if (group.short_lived) {
    // It has its place.
  } else if (group.home) {
    DeviceCopy* old = group.home_occupant.get();
    if (!old || evictable(*old)) {
      if (!old) --cold_residents_;
      planned.copy->place = Place::resident;
      planned.copy->memory = group.home;
      planned.copy->base = group.home.get();
      if (old) planned.displaced.push_back({0, group.bytes, nullptr, overwrite_after(*old)});
      group.home_occupant = planned.copy;
    } else {
      place_outside(planned);
    }
  } else if (!place_in_arena(planned, [this](const DeviceCopy& copy) { return may_go(copy); })) {
    place_outside(planned);
  }
  group.copy = planned.copy;
  return planned;
}

/// The copy of the weight's group, of which the weight alone is copied once more: in its place, `after`
/// these.
Engine::Planned Engine::plan_renewal(WeightId id, std::vector<EventPtr> after) {
  const Weight& weight = weights_[id];
  Group& group = groups_[weight.group];
  Planned planned;
  planned.demanded = true;
  planned.copy = group.copy;
  for (EventPtr& event : overwrite_after(*group.copy)) after.push_back(std::move(event));
  planned.displaced.push_back({weight.offset, weight.source->wanted_bytes(), nullptr, std::move(after)});
  planned.sources.resize(group.weights.size());
  planned.sources[weight.part] = weight.source;
  group.copy->parts[weight.part].outdated = false;
  drop_left(group.copy->parts[weight.part]);
  group.copy->state = DeviceCopy::State::issuing;
  group.copy->held_back = why_so_late(group);
  return planned;
}

bool Engine::place_in_arena(Planned& planned, const Arena::Rank& rank) {
  const Group& group = groups_[planned.copy->group];
  planned.displaced = arena_of(group).place(planned.copy, rank);
  if (planned.displaced.empty()) return false;
  const std::size_t offset = planned.displaced.front().offset;
  planned.copy->place = Place::arena;
  planned.copy->memory = group.by_use ? cache_memory_ : arena_memory_;
  planned.copy->base = planned.copy->memory.get() + offset;
  // What was used longest ago is free first, so the copy begins there (Note [A large group arrives in
  // parts]).
  std::stable_sort(planned.displaced.begin(), planned.displaced.end(),
                   [](const Arena::Region& a, const Arena::Region& b) {
                     return (a.occupant ? a.occupant->last_use : 0) < (b.occupant ? b.occupant->last_use : 0);
                   });
  for (Arena::Region& region : planned.displaced) {
    region.offset -= offset;
    if (!region.occupant) continue;
    if (!region.occupant->read) ++stats_.wasted_prefetches;
    detach(region.occupant);
    region.occupant.reset();
  }
  return true;
}

void Engine::place_outside(Planned& planned) {
  planned.copy->place = Place::overflow;
  overflow_now_ += planned.copy->bytes;
  if (beyond_budget() > 0 && options_.strict_budget) {
    overflow_now_ -= planned.copy->bytes;
    const std::size_t budget =
        options_.budget > 0 ? options_.budget : stats_.arena_bytes + stats_.resident_bytes;
    const std::size_t needed = budget + planned.copy->bytes;
    throw BudgetError(why_full() + ", and strict_budget=True does not allow more than the budget of " +
                          amount(budget) + "; " + remedy(needed),
                      needed);
  }
  note_peak();
}

/// Bytes outside the arena for which the budget has no room beside the arena and the residents.
std::size_t Engine::beyond_budget() const noexcept {
  const std::size_t held = stats_.arena_bytes + stats_.resident_bytes + overflow_now_;
  return held - std::min(held, planned_bytes_);
}

/// Plans the first copy of a resident, ahead of its use.
void Engine::bring_resident(GroupId id, std::vector<Planned>& planned) {
  if (!groups_[id].home || groups_[id].home_occupant) return;
  planned.push_back(plan_copy(id, /*demanded=*/true));  // which finds it a place
  planned.back().demanded = false;
  ++stats_.prefetches;
}

void Engine::look_ahead(const Schedule::Cursor& cursor, GroupId current, std::vector<Planned>& planned) {
  // The first pass meets residents too; each is brought once, before it is needed.
  for (std::uint32_t i = 1; cold_residents_ > 0 && i <= options_.prefetch && i < groups_.size(); ++i) {
    const GroupId id = static_cast<GroupId>((current + i) % groups_.size());
    bring_resident(id, planned);
  }

  Schedule::Cursor ahead = cursor;
  const Arena::Rank rank = [this](const DeviceCopy& copy) -> std::optional<std::uint64_t> {
    // What is needed before the group in question stays.
    if (!evictable(copy) || groups_[copy.group].expected_at == tick_) return std::nullopt;
    return willingness(copy);
  };
  for (std::size_t i = 0; i < kMostAhead; ++i) {
    const std::optional<GroupId> next = schedule_.advance(ahead);
    if (!next || *next == current) return;
    Group& group = groups_[*next];
    group.expected_at = tick_;
    if (group.copy) continue;
    if (!prefetch(*next, rank, planned)) return note_held_back(group, current);
  }
}

/// Plans copies of the groups by use that come next, if their order is fixed: Note [Experts in a fixed
/// order].
void Engine::look_ahead_by_use(UseOrder::Cursor ahead, std::vector<Planned>& planned) {
  if (!UseOrder::is_fixed(ahead)) return;
  const GroupId current = *ahead.current;
  const Arena::Rank latest_first = [this](const DeviceCopy& copy) -> std::optional<std::uint64_t> {
    // What is there and unread may be what expect() was told.
    if (!evictable(copy) || !copy.read || groups_[copy.group].expected_at == tick_) return std::nullopt;
    return copy.last_use;
  };
  std::size_t unread = 0;
  for (std::size_t i = 0; i < kMostAhead && unread < options_.prefetch; ++i) {
    const std::optional<GroupId> next = use_order_.advance(ahead);
    if (!next || *next == current) return;
    Group& group = groups_[*next];
    group.expected_at = tick_;
    if (!group.copy && !prefetch(*next, latest_first, planned)) return;
    unread += group.copy->read ? 0 : 1;
  }
}

/// Plans a copy that nobody waits for yet. False if there is no room for it.
bool Engine::prefetch(GroupId id, const Arena::Rank& rank, std::vector<Planned>& planned) {
  if (groups_[id].short_lived) {
    if (!weights_[groups_[id].weights.front()].source->has_bytes) return true;  // it has not been saved yet
    if (!has_room_beside(groups_[id].bytes)) return false;
  }
  Planned copy = plan_copy(id, /*demanded=*/false);
  if (!groups_[id].short_lived && !place_in_arena(copy, rank)) return false;
  groups_[id].copy = copy.copy;
  planned.push_back(std::move(copy));
  ++stats_.prefetches;
  return true;
}

void Engine::note_held_back(Group& group, GroupId current) noexcept {
  if (group.held_back == Cause::first_use) return;
  group.held_back = Cause::arena_full;
  for (const Arena::Region& region : arena_.regions()) {
    if (!region.occupant || region.occupant->leases == 0 || region.occupant->group == current) continue;
    group.held_back = Cause::slot_held;
    group.figures.held_by = region.occupant->group;
  }
}

void Engine::detach(const std::shared_ptr<DeviceCopy>& copy) {
  copy->attached = false;
  for (DeviceCopy::Part& part : copy->parts) drop_left(part);
  std::shared_ptr<DeviceCopy>& current = groups_[copy->group].copy;
  if (current == copy) current.reset();
  if (copy->evictable()) dispose(copy);
}

/// What a lease has left is freed with the retired memory: without the lock, and before the copies that are
/// planned now are issued.
void Engine::drop_left(DeviceCopy::Part& part) {
  if (part.left) retired_.push_back({Memory(std::move(part.left), nullptr), {}, 0, false});
}

void Engine::dispose(const std::shared_ptr<DeviceCopy>& copy) {
  if (closed_ && !copy->in_block_of_its_own()) {
    retired_.push_back({std::move(copy->memory), overwrite_after(*copy), 0, true});
    return;
  }
  switch (copy->place) {
    case Place::beside:
      retired_.push_back({std::move(copy->memory),
                          PROTECTED(retire_after_events) ? overwrite_after(*copy) : std::vector<EventPtr>(),
                          0, closed_ || read_in_order(*copy), copy->bytes});
      break;
    case Place::arena:
      arena_of(groups_[copy->group]).vacate(*copy, overwrite_after(*copy));
      break;
    case Place::resident:
      break;  // its block stays the group's; the next copy waits for what overwrite_after() says
    case Place::overflow: {
      const bool at_once = closed_ || options_.residents_give_way || read_in_order(*copy);
      retired_.push_back({std::move(copy->memory),
                          PROTECTED(retire_after_events) ? overwrite_after(*copy) : std::vector<EventPtr>(),
                          copy->bytes, at_once});
      break;
    }
  }
}

/// Whether everything that read it is on the stream in whose order its memory is handed out again.
bool Engine::read_in_order(const DeviceCopy& copy) const noexcept {
  const Stream order = backend_->order_of(copy.memory);
  return std::all_of(copy.released.begin(), copy.released.end(),
                     [order](const auto& reader) { return reader.first == order; });
}

/// How many threads use the model at the same time; 1 unless two of them hold a group each at this moment.
std::size_t Engine::calling_threads() const noexcept {
  std::size_t holding = 0, lately = 0;
  for (const Consumer& consumer : consumers_) {
    if (tick_ - consumer.last_use > weights_.size() * consumers_.size()) continue;  // it has ended
    ++lately;
    const std::optional<GroupId> current = consumer.cursor.current();
    const DeviceCopy* const copy = current ? groups_[*current].copy.get() : nullptr;
    const bool holds = copy && copy->leases > 0 && copy->last_use <= consumer.last_use;
    holding += holds || consumer.last_use == tick_ ? 1 : 0;
  }
  return holding > 1 ? lately : 1;
}

/// Why there is no slot for one more group.
std::string Engine::why_full() const {
  const std::size_t threads = calling_threads();
  if (threads < 2)
    return "every slot of the arena is held by tensors that are still in use (" + holders() + ")";
  return std::to_string(threads) + " threads call the model at the same time, and what they use (" +
         holders() + ") takes every slot of the arena";
}

/// What to do if every slot of the arena is taken. `needed`: the budget that would have held this group, too.
std::string Engine::remedy(std::size_t needed) const {
  const std::size_t threads = calling_threads();
  if (threads < 2) return "drop some of these tensors, or give a budget of " + amount(needed) + " or more";
  if (threads <= options_.prefetch) return "give a budget of " + amount(needed) + " or more";
  std::size_t kept = 0, largest = 0;
  for (const Group& group : groups_) {
    kept += group.keep ? group.bytes : 0;
    largest = std::max(largest, group.keep || group.by_use || group.short_lived ? 0 : group.bytes);
  }
  const std::size_t room = kept + (threads + 1) * largest;
  return "give a prefetch of " + std::to_string(threads) + " or more" +
         (options_.budget > 0 && options_.budget < room ? ", and a budget of " + amount(room) + " or more"
                                                        : "");
}

std::string Engine::holders() const {
  std::vector<GroupId> held;
  for (const Arena* const arena : {&arena_, &cache_}) {
    for (const Arena::Region& region : arena->regions()) {
      if (region.occupant && region.occupant->leases > 0) held.push_back(region.occupant->group);
    }
  }
  for (GroupId id = 0; id < groups_.size(); ++id) {
    // An outdated copy of a resident that somebody still reads.
    const DeviceCopy* const copy = groups_[id].home_occupant.get();
    if (copy && copy->leases > 0 && !copy->attached) held.push_back(id);
  }
  constexpr std::size_t kMostNamed = 3;
  std::ostringstream names;
  for (std::size_t i = 0; i < std::min(held.size(), kMostNamed); ++i) {
    names << (i > 0 ? ", " : "") << weights_[groups_[held[i]].weights.front()].source->name;
  }
  if (held.size() > kMostNamed) names << ", ...";
  return names.str();
}

std::size_t Engine::held_bytes() const noexcept {
  std::size_t bytes = overflow_now_;
  for (const Group& group : groups_) bytes += group.home && group.home_occupant ? group.bytes : 0;
  for (const Arena* const arena : {&arena_, &cache_}) {
    for (const Arena::Region& region : arena->regions()) bytes += region.occupant ? region.bytes : 0;
  }
  return bytes;
}

void Engine::note_peak() noexcept {
  stats_.overflow_bytes = std::max<std::uint64_t>(stats_.overflow_bytes, beyond_budget());
  stats_.peak_bytes =
      std::max<std::uint64_t>(stats_.peak_bytes, stats_.arena_bytes + stats_.resident_bytes + overflow_now_);
}

}  // namespace dynswap
