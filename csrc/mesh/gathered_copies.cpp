#include "mesh/gathered_copies.h"

#include <algorithm>
#include <exception>
#include <mutex>

#include "core/check.h"
#include "mesh/gathering_backend.h"
#include "platform/process.h"

namespace dynswap {

namespace {

/// So many groups of the order may be skipped to get to one that is asked for. Each costs 1/N of its copy.
constexpr std::size_t kSkipped = 4;
/// Calls of parts of a model are passes too, and some use nothing that is shared out: so many are looked at.
constexpr std::uint64_t kLately = 4;
/// After so many passes, the ranks have told each other what they use.
constexpr std::uint64_t kPassesToKnow = 2;
constexpr const char* kPrivate =
    "each rank has its weights to itself. Call share_masters(model) before the install, or map the weights "
    "of all ranks from one file (checkpoint.load)";

/// Bytes a second of the copies whose times are known, while any of them was under way; 0 if none is known.
double speed_of(const std::vector<std::pair<EventPtr, std::uint64_t>>& copies) {
  double bytes = 0;
  std::vector<Interval> times;
  for (const auto& [event, size] : copies) {
    const std::optional<Interval> when = event ? event->when() : std::nullopt;
    if (!when) continue;
    bytes += static_cast<double>(size);
    times.push_back(*when);
  }
  std::sort(times.begin(), times.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::int64_t busy = 0, until = 0;
  for (const Interval& time : times) {
    busy += std::max<std::int64_t>(0, time.end - std::max(time.begin, until));
    until = std::max(until, time.end);
  }
  return busy > 0 ? 1e9 * bytes / static_cast<double>(busy) : 0;
}

/// Whether all of these have the same word, and what it is.
std::optional<std::int64_t> agreed(const std::vector<Ranks::Words>& told, std::size_t word) {
  const std::int64_t first = told.front()[word];
  const bool same =
      std::all_of(told.begin(), told.end(), [&](const auto& each) { return each[word] == first; });
  return same ? std::optional(first) : std::nullopt;
}

std::int64_t least(const std::vector<Ranks::Words>& told, std::size_t word) {
  std::int64_t value = told.front()[word];
  for (const Ranks::Words& each : told) value = std::min(value, each[word]);
  return value;
}

/// Places of what the ranks tell each other.
enum : std::size_t { kDigest, kWholeSpeed, kGatherSpeed, kLeaves };

}  // namespace

GatheredCopies::GatheredCopies(std::unique_ptr<Ranks> ranks, Identity identity, bool always,
                               Milliseconds patience)
    : identity_(std::move(identity)),
      rank_(ranks->rank()),
      ranks_in_all_(ranks->size()),
      patience_(patience),
      measuring_(!always),
      ranks_(std::move(ranks)) {
  thread_.emplace(start_thread("dynswap-ranks", [this] { work(); }));
}

GatheredCopies::~GatheredCopies() {
  close();
  if (changed_.here()) return;
  // A forked child: what would speak to the other ranks, or frees the parent's memory, is leaked.
  new auto(std::move(ranks_));
  new auto(std::move(told_));
  new auto(std::move(scratch_));
  new auto(std::move(queue_));
}

std::unique_ptr<Backend> GatheredCopies::around(std::unique_ptr<Backend> inner) {
  std::shared_ptr<Backend> shared = std::move(inner);
  auto made = std::make_unique<GatheringBackend>(shared_from_this(), shared);
  {
    const std::lock_guard lock(mutex_);
    open_.push_back(std::move(shared));
  }
  changed_.notify_all();
  return made;
}

// ------------------------------------------------------------------------------------------ by the engine

SharedPart GatheredCopies::shared_part_of(const WholeGroup& group) const {
  return dynswap::shared_part_of(group, identity_);
}

SharedGroupPtr GatheredCopies::shared(const WholeGroup& group, const SharedPart& part) const {
  return shared_group(group, part, rank_, ranks_in_all_);
}

EventPtr GatheredCopies::copy(const std::shared_ptr<Backend>& inner, CopyRequest request,
                              const SharedGroupPtr& group) {
  std::vector<Piece> own;
  if (request.whole) {
    for_each_piece(*request.whole, group ? group->group.bytes : 0, request.whole->bytes, request.whole->base,
                   [&](Piece piece) { own.push_back(std::move(piece)); });
  }
  const std::uint64_t own_bytes = stored_bytes(own);
  {
    const std::lock_guard lock(mutex_);
    figures_.private_bytes += own_bytes;
  }
  if (!group || group->part == 0) return copy_whole(*inner, std::move(request));
  const std::size_t bytes = request.whole->bytes;
  {
    const std::lock_guard lock(mutex_);
    if (failed_.empty() && left_.empty() && !closed_) copied_.push_back(group);
    const bool open = std::find(open_.begin(), open_.end(), inner) != open_.end();
    const std::size_t end = open ? std::min(order_.size(), next_ + kSkipped + 1) : 0;
    for (std::size_t at = next_; at < end; ++at) {
      if (order_[at]->identity != group->identity) continue;
      std::vector<EventPtr> after;
      for (Step& step : request.steps) after.insert(after.end(), step.after.begin(), step.after.end());
      auto copied = std::make_shared<Gathered>(inner, group, request.whole->base, std::move(own),
                                               group->read + own_bytes, std::move(after));
      if (measuring_) gathered_.emplace_back(copied, bytes);
      gather_unused(at);
      enqueue(copied);
      ++next_;
      ++figures_.gathered;
      return copied;
    }
    ++figures_.whole;
  }
  EventPtr copied = copy_whole(*inner, std::move(request));
  if (!measuring_) return copied;
  const std::lock_guard lock(mutex_);
  whole_.emplace_back(copied, bytes);
  return copied;
}

EventPtr GatheredCopies::copy_whole(Backend& inner, CopyRequest request) {
  for (Step& step : request.steps) {
    std::vector<EventPtr> after;
    for (const EventPtr& event : step.after) add_settled(event, after);
    step.after = std::move(after);
  }
  request.whole.reset();
  return inner.copy(std::move(request));
}

/// Adds what the inner backend knows the event as. Waits until it has been issued: other ranks may be late.
void GatheredCopies::add_settled(const EventPtr& event, std::vector<EventPtr>& settled) {
  auto* const gathered = dynamic_cast<Gathered*>(event.get());
  if (gathered == nullptr) {
    settled.push_back(event);
    return;
  }
  try {
    wait(*gathered);
    if (gathered->end) settled.push_back(gathered->end);
  } catch (const SourceError&) {
    if (gathered->share) settled.push_back(gathered->share);
    if (gathered->started) return;
    for (const EventPtr& earlier : gathered->after) add_settled(earlier, settled);
  }
}

/// Waits until the copy is issued; on the host, until it is over. Throws why it has failed.
void GatheredCopies::wait(Gathered& copy) {
  if (copy.state.load(std::memory_order_acquire) == Gathered::State::issued) return;
  std::unique_lock lock(mutex_);
  if (!changed_.wait(lock, [&] { return copy.state != Gathered::State::queued; })) throw Error(kOnlyInParent);
  if (copy.state == Gathered::State::failed) std::rethrow_exception(copy.error);
}

/// Copies the group of a copy that has failed whole, to where it should have been gathered. Its memory is
/// that of who waits for it.
void GatheredCopies::copy_whole_again(Gathered& copy) {
  Gathered::State expected = Gathered::State::failed;
  if (!copy.state.compare_exchange_strong(expected, Gathered::State::queued))
    return wait(copy);  // another thread does it
  const auto settle = [&](Gathered::State state) {
    {
      const std::lock_guard lock(mutex_);
      copy.state.store(state, std::memory_order_release);
    }
    changed_.notify_all();
  };
  try {
    CopyRequest request;
    request.demanded = true;
    Step& step = request.steps.emplace_back();
    step.pieces = copy.own;
    if (copy.share) step.after.push_back(copy.share);
    for (const EventPtr& event : copy.after) add_settled(event, step.after);
    for_each_piece(copy.group->group, 0, copy.group->group.bytes, copy.base,
                   [&](Piece piece) { step.pieces.push_back(std::move(piece)); });
    copy.end = copy.inner->copy(std::move(request));
  } catch (...) {
    settle(Gathered::State::failed);
    throw;
  }
  settle(Gathered::State::issued);
}

/// Nothing is copied with `inner` from now on. Waits for what has been asked of it.
void GatheredCopies::let_go_of(const Backend& inner) noexcept {
  std::shared_ptr<Backend> goes;
  std::unique_lock lock(mutex_);
  const auto found =
      std::find_if(open_.begin(), open_.end(), [&](const auto& each) { return each.get() == &inner; });
  if (found != open_.end()) {
    goes.swap(*found);
    open_.erase(found);
  }
  static_cast<void>(changed_.wait(lock, [&] {
    return std::none_of(queue_.begin(), queue_.end(),
                        [&](const auto& task) { return task->inner.get() == &inner; });
  }));
}

/// LOCK: mutex_ is held.
void GatheredCopies::enqueue(std::shared_ptr<Gathered> task) {
  queue_.push_back(std::move(task));
  changed_.notify_all();
}

/// Takes part for the other ranks, up to `end` of the order. LOCK: mutex_ is held.
void GatheredCopies::gather_unused(std::size_t end) {
  for (; next_ < end; ++next_) {
    enqueue(std::make_shared<Gathered>(nullptr, order_[next_], nullptr, std::vector<Piece>(),
                                       order_[next_]->read, std::vector<EventPtr>()));
    ++figures_.unused;
  }
}

// ------------------------------------------------------------------------------------------ by the session

void GatheredCopies::begin_pass() {
  if (!changed_.here()) return;
  const std::lock_guard one_at_a_time(one_pass_);
  const auto over = [this] {
    const std::lock_guard lock(mutex_);
    if (closed_ || !left_.empty() || (!failed_.empty() && raised_.exchange(true))) return true;
    if (!failed_.empty()) throw SourceError(failed_);
    return false;
  };
  if (over()) return;
  begin_next_pass(Pass::of_this_rank);
  static_cast<void>(over());
}

/// LOCK: one_pass_ is held.
void GatheredCopies::begin_next_pass(Pass pass) {
  Timed whole, gathered;
  std::shared_ptr<Ranks> ranks;
  std::unique_ptr<Ranks::Told> told;
  std::vector<SharedGroupPtr> groups, before;
  {
    const std::lock_guard lock(mutex_);
    // If it has used none, it has nothing against the order.
    if (pass != Pass::of_this_rank && copied_.empty()) copied_ = order_;
    gather_unused(order_.size());  // and nothing of it until there is an order again
    groups = std::exchange(told_of_, std::exchange(copied_, {}));
    told = std::move(told_);
    ranks = ranks_;
    whole.swap(whole_);
    gathered.swap(gathered_);
  }
  changed_.notify_all();
  const double whole_speed = speed_of(whole), gather_speed = speed_of(gathered);
  std::vector<Ranks::Words> heard;
  try {
    if (told) heard = told->wait();
  } catch (const std::exception& error) {
    fail("another rank takes no part in the calls of the model: " + ranks->states() + " (" + error.what() +
         ")");
    ranks->note("has waited in vain for others to call the model", /*failed=*/true);
  }
  Ranks::Words words{};
  {
    const std::lock_guard lock(mutex_);
    if (!failed_.empty()) return;
    if (!heard.empty()) {
      const bool together = decide(heard);
      before = std::exchange(order_, together ? std::move(groups) : std::vector<SharedGroupPtr>());
      if (!order_.empty()) {
        shared_in_pass_ = figures_.passes + 1;
        shared_then_ = order_.size();
      }
      next_ = 0;
    }
    if (!left_.empty()) return;
    ++figures_.passes;
    figures_.for_others += pass == Pass::of_others ? 1 : 0;
    if (whole_speed > 0) figures_.whole_speed = whole_speed;
    if (gather_speed > 0) figures_.gather_speed = gather_speed;
    std::uint64_t digest = 0;
    for (const SharedGroupPtr& group : told_of_) digest = mixed(digest, group->identity);
    words[kDigest] = static_cast<std::int64_t>(digest);
    words[kWholeSpeed] = static_cast<std::int64_t>(figures_.whole_speed);
    words[kGatherSpeed] = static_cast<std::int64_t>(figures_.gather_speed);
    words[kLeaves] = pass == Pass::last ? 1 : 0;
    to_note_ = true;
  }
  try {
    std::unique_ptr<Ranks::Told> telling = ranks->tell(words);
    const std::lock_guard lock(mutex_);
    told_ = std::move(telling);
  } catch (const std::exception& error) {
    fail(std::string("the ranks cannot tell each other what they use: ") + error.what());
  }
  changed_.notify_all();
}

/// Whether the groups that were told of are the order in force. LOCK: mutex_ is held. Every rank is given the
/// same words.
bool GatheredCopies::decide(const std::vector<Ranks::Words>& told) {
  const std::int64_t whole = least(told, kWholeSpeed), gathered = least(told, kGatherSpeed);
  if (measuring_ && whole > 0 && gathered > 0) {
    measuring_ = false;
    slower_ = gathered < whole;
  }
  for (std::size_t rank = 0; rank < told.size() && left_.empty(); ++rank) {
    if (told[rank][kLeaves] != 0)
      left_ = "rank " + std::to_string(ranks_->number_of(rank)) + " has uninstalled the model";
  }
  const std::optional<std::int64_t> digest = agreed(told, kDigest);
  differ_ = !digest;
  return digest && *digest != 0 && !slower_ && left_.empty();
}

void GatheredCopies::close() noexcept {
  if (!changed_.here()) return;
  const std::lock_guard one_at_a_time(one_pass_);
  std::unique_ptr<Ranks::Told> told;
  bool leaves = false;
  {
    const std::lock_guard lock(mutex_);
    leaves = !closed_ && failed_.empty() && left_.empty();
  }
  if (leaves) {  // A last pass. Those that do not call the model now take part in it, too.
    try {
      begin_next_pass(Pass::last);
      const std::lock_guard lock(mutex_);
      if (failed_.empty()) gather_unused(order_.size());
      told = std::move(told_);
    } catch (const std::exception& error) {
      fail(error.what());
    }
  }
  changed_.notify_all();
  try {
    if (told) static_cast<void>(told->wait());
  } catch (const std::exception&) {  // whoever has not heard it is told when it misses this rank
  }
  std::optional<Thread> thread;
  std::vector<SharedGroupPtr> order, copied, told_of;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    next_ = 0;
    order.swap(order_);
    copied.swap(copied_);
    told_of.swap(told_of_);
    thread.swap(thread_);
  }
  changed_.notify_all();
  if (!thread) return;
  thread->join();
  if (scratch_used_) scratch_by_->synchronise(scratch_used_);
  scratch_used_.reset();
  scratch_by_.reset();
  scratch_.reset();
  std::shared_ptr<Ranks> ranks;
  const std::lock_guard lock(mutex_);
  told.swap(told_);
  ranks.swap(ranks_);  // so that ranks which miss this one hear of it at once
}

std::string GatheredCopies::why_no_order() const {
  if (all_private()) return kPrivate;
  const bool copies_none = figures_.whole + figures_.gathered + figures_.private_bytes == 0;
  if (figures_.passes > kPassesToKnow && copies_none)
    return "the calls copy no weights, or only small ones: the others are on the device";
  return "the order of use is not known yet";
}

bool GatheredCopies::all_private() const noexcept {
  return figures_.private_bytes > 0 && figures_.whole + figures_.gathered == 0;
}

std::string GatheredCopies::take_complaint() {
  const std::lock_guard lock(mutex_);
  if (complained_ || figures_.passes <= kPassesToKnow || !all_private()) return {};
  complained_ = true;
  return "the ranks of mesh= share out no copies: " + std::string(kPrivate);
}

GatheredCopies::Figures GatheredCopies::figures() const {
  const std::lock_guard lock(mutex_);
  Figures figures = figures_;
  if (!changed_.here()) {
    figures.why_not = kOnlyInParent;
    return figures;
  }
  const bool lately = !differ_ && figures_.passes < shared_in_pass_ + kLately;
  figures.order = order_.empty() && lately ? shared_then_ : order_.size();
  if (!failed_.empty()) {
    figures.why_not = failed_;
  } else if (!left_.empty()) {
    figures.why_not = left_;
  } else if (slower_) {
    figures.why_not = "it is slower than copies of whole groups";
  } else if (differ_) {
    figures.why_not = "the ranks do not use the same weights in the same order";
  } else if (figures.order == 0) {
    figures.why_not = why_no_order();
  }
  return figures;
}

/// Nothing is gathered from now on: the thread drops what is waiting, and later copies are of whole groups.
void GatheredCopies::fail(std::string why) noexcept {
  std::vector<SharedGroupPtr> order, copied, told_of;
  std::unique_ptr<Ranks::Told> told;
  {
    const std::lock_guard lock(mutex_);
    if (failed_.empty()) failed_ = std::move(why);
    next_ = 0;
    order.swap(order_);
    copied.swap(copied_);
    told_of.swap(told_of_);
    told.swap(told_);
  }
  changed_.notify_all();
}

}  // namespace dynswap
