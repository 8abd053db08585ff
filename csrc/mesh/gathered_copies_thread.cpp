// GatheredCopies: its thread, which gathers in the order in force.
#include <algorithm>
#include <exception>
#include <mutex>

#include "core/check.h"
#include "mesh/gathered_copies.h"
#include "mesh/gathering_backend.h"

namespace dynswap {

namespace {

/// How soon a rank looks whether the others wait for the next pass, after it has taken part for them.
constexpr std::chrono::milliseconds kSoon{1};

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an unknown error";
  }
}

}  // namespace

void GatheredCopies::work() {
  std::size_t groups = 1;  // to gather for others at a time, which doubles with each time
  std::chrono::milliseconds patience = patience_;
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto wanted = [this] {
      return to_note_ || (queue_.empty() ? closed_ : can_begin(*queue_.front()));
    };
    if (!changed_.wait_for(lock, patience, wanted)) {
      if (!changed_.here()) return;  // in a forked child
      if (next_ < order_.size()) {
        gather_unused(std::min(order_.size(), next_ + groups));
        groups = std::min(2 * groups, order_.size());
      } else {
        patience = take_part_in_next_pass(lock) ? kSoon : std::min(2 * patience, patience_);
      }
      continue;
    }
    if (std::exchange(to_note_, false)) {
      const std::uint64_t pass = figures_.passes;
      lock.unlock();
      note_pass(pass);
      free_scratch(pass);
      lock.lock();
      continue;
    }
    if (queue_.empty()) break;
    if (!failed_.empty()) {
      drop_queue(lock);
      continue;
    }
    std::shared_ptr<Gathered> task = queue_.front();
    if (task->base != nullptr) {  // for this rank
      groups = 1;
      patience = patience_;
    }
    if (!task->inner && !open_.empty()) task->inner = open_.front();
    lock.unlock();
    run(*task);
    lock.lock();
    if (task->state != Gathered::State::issued) continue;  // it goes with the others
    queue_.pop_front();
    lock.unlock();
    changed_.notify_all();
    task.reset();
    lock.lock();
  }
  lock.unlock();
  ranks_->note("has uninstalled the model");
}

void GatheredCopies::note_pass(std::uint64_t pass) noexcept {
  try {
    ranks_->note_pass(pass);
  } catch (const std::exception& error) {
    fail(std::string("the ranks cannot tell each other where they are: ") + error.what());
  }
}

/// Gives its memory back once a pass has gone by without it.
void GatheredCopies::free_scratch(std::uint64_t pass) noexcept {
  if (!scratch_ || scratch_pass_ + 1 >= pass || (scratch_used_ && !scratch_used_->done())) return;
  scratch_.reset();
  scratch_bytes_ = 0;
  scratch_used_.reset();
  scratch_by_.reset();
}

/// Takes part in the next pass for other ranks, if one of them has begun it while this rank does not call the
/// model. Gives up the lock for a while.
bool GatheredCopies::take_part_in_next_pass(std::unique_lock<Mutex>& lock) noexcept {
  if (closed_ || !failed_.empty() || !left_.empty()) return false;
  const std::uint64_t next = figures_.passes + 1;
  lock.unlock();
  bool took_part = false;
  try {
    const std::unique_lock one_at_a_time(one_pass_, std::try_to_lock);
    if (one_at_a_time && ranks_->begun(next)) {
      begin_next_pass(Pass::of_others);
      took_part = true;
    }
  } catch (const std::exception& error) {
    fail(std::string("the ranks cannot tell each other where they are: ") + error.what());
  }
  lock.lock();
  return took_part;
}

/// Whether there is something to do for the next in the queue. Between two plans there is no memory for what
/// only other ranks use. LOCK: mutex_ is held.
bool GatheredCopies::can_begin(const Gathered& task) const noexcept {
  return task.inner || !open_.empty() || closed_ || !failed_.empty();
}

/// All that waits fails. Only the thread of GatheredCopies does that, and so never while it is at one of
/// them: the memory of one that has failed is free.
void GatheredCopies::drop_queue(std::unique_lock<Mutex>& lock) {
  std::deque<std::shared_ptr<Gathered>> dropped;
  dropped.swap(queue_);
  for (const std::shared_ptr<Gathered>& task : dropped) {
    task->error = std::make_exception_ptr(SourceError(failed_));
    task->state.store(Gathered::State::failed, std::memory_order_release);
  }
  lock.unlock();
  changed_.notify_all();
  dropped.clear();
  lock.lock();
}

void GatheredCopies::run(Gathered& task) {
  bool brought = false;  // this rank's part
  try {
    if (!task.inner) throw Error("its model is being uninstalled");
    start(task);
    {
      // The part of the next copy, while this one's are exchanged.
      std::unique_lock lock(mutex_);
      const std::shared_ptr<Gathered> next = queue_.size() > 1 ? queue_[1] : nullptr;
      lock.unlock();
      const auto free_now = [](const EventPtr& event) {
        const auto* const gathered = dynamic_cast<const Gathered*>(event.get());
        return gathered == nullptr || gathered->state != Gathered::State::queued;
      };
      if (next && next->base != nullptr && std::all_of(next->after.begin(), next->after.end(), free_now))
        start(*next);
    }
    task.inner->wait(ranks_->stream(), task.share);
    brought = true;
    ranks_->all_gather(task.base, task.group->part);
    task.host_time.end = task.inner->now();
    if (task.inner->device_time()) {
      task.end = task.inner->mark(ranks_->stream());
      if (!task.end) task.end = task.inner->record(ranks_->stream());
    }
    if (task.base == scratch_.get()) {
      scratch_used_ = task.end;
      scratch_by_ = task.inner;
    }
    task.after.clear();
    const SharedGroupPtr group = std::move(task.group);  // what a lease keeps needs no masters
    const std::vector<Piece> own = std::move(task.own);
    const std::lock_guard lock(mutex_);
    if (task.base == scratch_.get()) scratch_pass_ = figures_.passes;
    figures_.received_bytes += group->all_bytes - group->read;
    task.state.store(Gathered::State::issued, std::memory_order_release);
  } catch (...) {
    const std::string what = text_of(std::current_exception());
    const std::string& name = task.group->group.parts.front().source->name;
    ranks_->note(brought ? "has waited in vain for parts of " + name
                         : "could not bring its part of " + name + ": " + what,
                 /*failed=*/true);
    fail("a part of " + name + " did not come from another rank: " + ranks_->states() + " (" + what + ")");
  }
}

/// Begins the copy of this rank's part. Does nothing if that has been done.
void GatheredCopies::start(Gathered& task) {
  if (task.started) return;
  if (task.base == nullptr) {
    if (scratch_bytes_ < task.group->group.bytes) {
      if (scratch_used_) scratch_by_->synchronise(scratch_used_);
      scratch_.reset();
      scratch_bytes_ = 0;
      scratch_ = task.inner->allocate(task.group->group.bytes);
      scratch_bytes_ = task.group->group.bytes;
    } else if (scratch_used_) {
      task.after.push_back(scratch_used_);
    }
    task.base = scratch_.get();
  }
  task.host_time.begin = task.inner->now();
  CopyRequest request;
  request.demanded = true;
  Step& step = request.steps.emplace_back();
  step.pieces = task.own;
  for (const EventPtr& event : task.after) add_settled(event, step.after);
  for_each_piece_of(*task.group, rank_, ranks_in_all_, task.base,
                    [&](Piece piece) { step.pieces.push_back(std::move(piece)); });
  task.share = task.inner->copy(std::move(request));
  task.started = true;
}

}  // namespace dynswap
