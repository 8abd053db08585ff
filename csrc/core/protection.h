// The protections that keep a streamed weight right, by name.
//
// In production PROTECTED(name) is the constant `true`. The race tests are built with DYNSWAP_MUTANTS: there
// one protection at a time is taken away, and a wrong byte has to be seen: of the engine's by a seed of the
// fake device (tests/cpp/test_protections.cpp), of all but those in NOT_SEEN (tests/cruel/teeth.py) by a
// program that installs a model on the pretend GPU (tests/cruel). A protection that can be taken away
// unnoticed is either not needed or not tested.
#pragma once

#include <atomic>

namespace dynswap {

enum class Protection : int {
  none,

  // The engine's (core).
  read_after_copy,         ///< Invariant 2: the consumer stream waits for the copy
  every_stream_waits,      ///< Invariant 2: each further consumer stream waits too
  write_after_read,        ///< Invariant 1: the copy waits for the last readers of what it overwrites
  record_every_stream,     ///< Invariant 1: ... on every stream that read it
  lease_blocks_eviction,   ///< Invariant 1: a slot that somebody holds is not chosen
  release_before_reuse,    ///< Invariant 1: a slot is not chosen while its release is being recorded
  copy_after_copy,         ///< a copy nobody waited for is over before its slot is written again
  step_waits,              ///< each part of a large copy waits for what it overwrites itself
  stale_copy_refused,      ///< Invariant 6: a copy of a master that has changed is not handed out
  failed_copy_refused,     ///< Invariant 9: a copy that failed is not handed out, and is tried again
  retire_after_events,     ///< memory outside the arena is freed only after its readers
  lease_keeps_resident,    ///< Invariant 1: a resident that somebody holds does not give way
  changed_not_taken_back,  ///< Invariant 6: a resident's copy on loan does not outlive a change of its master
  lease_not_inherited,     ///< Invariant 1: a resident that somebody holds does not go to the next plan
  readers_inherited,       ///< Invariant 1: an inherited resident keeps its readers' events
  arrived_before_inherited,  ///< Invariant 2: a resident is inherited once a reader has waited for it
  cap_respected,             ///< Invariant 4: arena + residents stay within the budget

  // The backend's over a GPU (cuda), and those of the memory that it reads.
  fresh_memory_waits,       ///< Note [Fresh memory is old memory]
  close_waits,              ///< copies are over before what they read and write is let go
  plan_goes_after_readers,  ///< Note [A plan goes before the next one comes]
  bytes_outlive_storage,    ///< Note [Bytes that outlive their storage]
  copies_keep_locks,        ///< Note [A copy keeps its source page-locked]
  staged_copy_waits,        ///< a copy from a staging buffer comes after the read into it
  staged_read_waits,        ///< a read into a staging buffer comes after the copy from it
  failed_read_told,         ///< Note [A read can fail after its copy was issued]

  // The sessions' (tensor, session).
  gradient_made,          ///< a gradient is carried away after it was computed
  gradient_held,          ///< its memory is not reused before it was carried away
  gradient_arrived,       ///< it is used on the host after it came
  second_stream_told,     ///< a tensor that is handed out again is leased for that stream too
  record_stream_heard,    ///< Note [Used on a stream that never asked]
  resident_per_stream,    ///< a resident handed out without the engine is known to have come for that stream
  changed_master_seen,    ///< Invariant 6: a new version of a master is seen
  silent_write_seen,      ///< Invariant 6: a write that bumps no version is seen
  written_back,           ///< what was written on a tensor reaches the master when the tensor dies
  living_written_back,    ///< and before, when the master is asked for
  written_before_read,    ///< it is read after those who may have written it, whatever their stream
  untracked_alias_noted,  ///< Note [Writes without a trace]
  statistics_arrived,     ///< Note [Statistics are written back together]: read once they have arrived
  master_wins,            ///< a master that was written itself is not overwritten
  private_copies,         ///< small buffers of modules that train are compared, not trusted
  saved_version_checked,  ///< backward refuses masters that were written since forward
  saved_after_compute,    ///< a tensor that is saved leaves the device after it was computed
  saved_memory_held,      ///< and its memory is not reused before its copy is over
  saved_written_after_copied,  ///< a file is given its bytes once they are in the buffer
  saved_back_after_left,       ///< it is brought back once it has arrived on the host
  saved_copies_current,        ///< what has left stands for views of the bytes that left alone
  capture_refused,             ///< a slot is not captured by a CUDA graph
  after_replays,               ///< a resident is written anew after the graphs that were captured over it
  count                        ///< not a protection: how many there are
};

/// The last Protection that is in the core.
inline constexpr Protection kLastOfEngine = Protection::cap_respected;

#ifdef DYNSWAP_MUTANTS
inline std::atomic<Protection> removed_protection{Protection::none};
#define PROTECTED(name) \
  (::dynswap::removed_protection.load(std::memory_order_relaxed) != ::dynswap::Protection::name)
#else
#define PROTECTED(name) true
#endif

}  // namespace dynswap
