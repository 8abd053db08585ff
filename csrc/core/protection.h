// The protections that keep a streamed weight right, by name.
//
// In production PROTECTED(name) is the constant `true`. The race tests are built with
// DYNSWAP_MUTANTS: there one protection at a time is taken away, and a seed of the fake device has to
// see a wrong byte (tests/cpp/test_protections.cpp). A protection that can be taken away unnoticed is
// either not needed or not tested.
#pragma once

#include <atomic>

namespace dynswap {

enum class Protection : int {
  none,
  read_after_copy,        ///< Invariant 2: the consumer stream waits for the copy
  every_stream_waits,     ///< Invariant 2: each further consumer stream waits too
  write_after_read,       ///< Invariant 1: the copy waits for the last readers of what it overwrites
  record_every_stream,    ///< Invariant 1: ... on every stream that read it
  lease_blocks_eviction,  ///< Invariant 1: a slot that somebody holds is not chosen
  release_before_reuse,   ///< Invariant 1: a slot is not chosen while its release is being recorded
  copy_after_copy,        ///< a copy nobody waited for is over before its slot is written again
  step_waits,             ///< each part of a large copy waits for what it overwrites itself
  stale_copy_refused,     ///< Invariant 6: a copy of a master that has changed is not handed out
  failed_copy_refused,    ///< Invariant 9: a copy that failed is not handed out, and is tried again
  retire_after_events,    ///< memory outside the arena is freed only after its readers
  cap_respected,          ///< Invariant 4: arena + residents stay within the budget
  count                   ///< not a protection: how many there are
};

#ifdef DYNSWAP_MUTANTS
inline std::atomic<Protection> removed_protection{Protection::none};
#define PROTECTED(name) \
  (::dynswap::removed_protection.load(std::memory_order_relaxed) != ::dynswap::Protection::name)
#else
#define PROTECTED(name) true
#endif

}  // namespace dynswap
