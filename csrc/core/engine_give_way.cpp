// Engine: residents that make room for others.
//
// Note [Residents give way]
// When a device's memory runs short, whoever allocates may take the memory of residents that nobody uses.
// Such residents have a block each. They are on loan first, as it is not known at that point whether memory
// is short at all: see Note [When torch's allocator asks]. What is not taken back has given way: it passes
// through the arena like any other group until the next plan, or, if it is too large for that, through memory
// that is allocated and freed with each copy. The arena is as large as it would be without residents, so with
// all of them gone the engine holds no more than with budget="minimum", but for what the user keeps (keep=)
// and for the cache of experts (Note [Groups by use]).
//
// LOCK order: the allocator's lock, which the caller may hold, comes before mutex_. So nothing under mutex_
// may allocate or free device memory, nor wait for Python.
#include <algorithm>
#include <mutex>
#include <utility>

#include "core/engine.h"
#include "core/protection.h"

namespace dynswap {

std::vector<Engine::Loan> Engine::lend_residents() {
  struct Candidate {
    Loan loan;
    Memory memory;
    std::vector<EventPtr> after;
  };
  std::vector<Candidate> candidates;
  std::vector<Retired> retired;
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || !planned_ || abandoned_ || !options_.residents_give_way) return {};
    for (GroupId id = 0; id < groups_.size(); ++id) {
      Group& group = groups_[id];
      const std::shared_ptr<DeviceCopy> occupant = group.home_occupant;
      if (!group.home || group.keep || group.captured) continue;
      if (occupant && !occupant->evictable() && PROTECTED(lease_keeps_resident)) continue;
      Candidate& candidate = candidates.emplace_back();
      const bool current = occupant && occupant == group.copy;
      candidate.loan = {id,
                        group.bytes,
                        group.home.get(),
                        occupant,
                        current,
                        group.changes,
                        backend_->order_of(group.home)};
      candidate.memory = std::move(group.home);
      group.home.reset();
      if (occupant) {
        candidate.after = overwrite_after(*occupant);
        if (occupant->attached) detach(occupant);
        occupant->memory.reset();
        group.home_occupant.reset();
      } else {
        --cold_residents_;
      }
      stats_.resident_bytes -= group.bytes;
      --stats_.resident_groups;
    }
    // What leases have left may need Python to go (Note [What a lease leaves]), and stays.
    const auto memory = std::stable_partition(retired_.begin(), retired_.end(),
                                              [](const Retired& item) { return item.overflow_bytes == 0; });
    retired.assign(std::make_move_iterator(memory), std::make_move_iterator(retired_.end()));
    retired_.erase(memory, retired_.end());
  }

  std::vector<Loan> loans;
  for (Candidate& candidate : candidates) {
    if (backend_->release_after(candidate.memory, candidate.after)) {
      candidate.memory.reset();
      loans.push_back(std::move(candidate.loan));
    } else {
      const std::lock_guard lock(mutex_);
      restore(candidate.loan, candidate.memory);
    }
  }
  std::size_t freed_bytes = 0;
  std::erase_if(retired, [&](Retired& item) {
    if (!backend_->release_after(item.memory, item.after)) return false;
    freed_bytes += item.overflow_bytes;
    return true;
  });
  const std::lock_guard lock(mutex_);
  overflow_now_ -= freed_bytes;
  retired_.insert(retired_.end(), std::make_move_iterator(retired.begin()),
                  std::make_move_iterator(retired.end()));
  return loans;
}

/// Note [Blocks that have become one]
/// The allocator joins free blocks that are next to each other, and takes a new block from the beginning of
/// the smallest free block that is large enough. So an allocation for one group may come from the address
/// where another group was: then that group's size is asked for next. This ends, as each such block is
/// smaller than the one before, or is the same one. Blocks of one size may come in any order. A block that no
/// group had is a stray and is kept until the end; if a group was inside it, only the part in front of that
/// group is asked for.
void Engine::take_back(std::vector<Loan> loans, const std::function<bool()>& intact) {
  constexpr std::size_t kSomeStrays = 16;
  std::size_t attempts = 4 * loans.size() + kSomeStrays;
  std::vector<Memory> strays;
  std::size_t bytes = loans.empty() ? 0 : loans.back().bytes;
  while (!loans.empty() && attempts-- > 0) {
    Memory memory;
    try {
      memory = backend_->allocate(bytes);
    } catch (const Error&) {
      break;  // there is less memory than there was
    }
    if (intact && !intact()) break;  // this allocation has cost the blocks their memory
    const auto own = std::find_if(loans.begin(), loans.end(),
                                  [&](const Loan& loan) { return loan.address == memory.get(); });
    if (own == loans.end()) {
      std::size_t in_front = bytes;
      for (const Loan& loan : loans) {
        if (loan.address > memory.get() && loan.address < memory.get() + in_front)
          in_front = static_cast<std::size_t>(loan.address - memory.get());
      }
      if (in_front == bytes) strays.push_back(std::move(memory));
      bytes = in_front == bytes ? loans.back().bytes : in_front;
    } else if (own->bytes != bytes) {
      bytes = own->bytes;
    } else {
      const std::lock_guard lock(mutex_);
      if (!restore(*own, memory)) break;
      loans.erase(own);
      if (!loans.empty()) bytes = loans.back().bytes;
    }
  }
  give_up(loans);
}

/// LOCK: mutex_ is held. Takes `memory`, with the bytes that were there, for the group's own again.
bool Engine::restore(const Loan& loan, Memory& memory) {
  Group& group = groups_[loan.group];
  if (closed_ || group.home) return false;
  group.home = std::move(memory);
  stats_.resident_bytes += group.bytes;
  ++stats_.resident_groups;
  // Meanwhile another copy may have been made elsewhere, or the bytes may have become outdated.
  if (loan.current && !group.copy && (loan.changes == group.changes || !PROTECTED(changed_not_taken_back))) {
    loan.copy->memory = group.home;
    loan.copy->attached = true;
    group.copy = loan.copy;
  }
  group.home_occupant = loan.copy;  // what is written there next comes after its readers
  if (!loan.copy) ++cold_residents_;
  note_peak();
  return true;
}

void Engine::give_up(const std::vector<Loan>& loans) {
  const std::lock_guard lock(mutex_);
  for (const Loan& loan : loans) {
    ++stats_.given_way;
    stats_.given_way_bytes += loan.bytes;
  }
}

}  // namespace dynswap
