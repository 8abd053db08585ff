// The protections of core/protection.h by name.
#pragma once

#include "core/protection.h"

namespace dynswap::test {

inline const char* name_of(Protection protection) {
  // No default: a protection that is added there has to be named here (-Wall -Werror).
  switch (protection) {
    case Protection::none:
      return "none";
    case Protection::read_after_copy:
      return "read_after_copy";
    case Protection::every_stream_waits:
      return "every_stream_waits";
    case Protection::write_after_read:
      return "write_after_read";
    case Protection::record_every_stream:
      return "record_every_stream";
    case Protection::lease_blocks_eviction:
      return "lease_blocks_eviction";
    case Protection::release_before_reuse:
      return "release_before_reuse";
    case Protection::copy_after_copy:
      return "copy_after_copy";
    case Protection::step_waits:
      return "step_waits";
    case Protection::stale_copy_refused:
      return "stale_copy_refused";
    case Protection::failed_copy_refused:
      return "failed_copy_refused";
    case Protection::retire_after_events:
      return "retire_after_events";
    case Protection::lease_keeps_resident:
      return "lease_keeps_resident";
    case Protection::changed_not_taken_back:
      return "changed_not_taken_back";
    case Protection::lease_not_inherited:
      return "lease_not_inherited";
    case Protection::readers_inherited:
      return "readers_inherited";
    case Protection::arrived_before_inherited:
      return "arrived_before_inherited";
    case Protection::cap_respected:
      return "cap_respected";
    case Protection::fresh_memory_waits:
      return "fresh_memory_waits";
    case Protection::close_waits:
      return "close_waits";
    case Protection::plan_goes_after_readers:
      return "plan_goes_after_readers";
    case Protection::bytes_outlive_storage:
      return "bytes_outlive_storage";
    case Protection::copies_keep_locks:
      return "copies_keep_locks";
    case Protection::staged_copy_waits:
      return "staged_copy_waits";
    case Protection::staged_read_waits:
      return "staged_read_waits";
    case Protection::failed_read_told:
      return "failed_read_told";
    case Protection::gradient_made:
      return "gradient_made";
    case Protection::gradient_held:
      return "gradient_held";
    case Protection::gradient_arrived:
      return "gradient_arrived";
    case Protection::second_stream_told:
      return "second_stream_told";
    case Protection::record_stream_heard:
      return "record_stream_heard";
    case Protection::resident_per_stream:
      return "resident_per_stream";
    case Protection::changed_master_seen:
      return "changed_master_seen";
    case Protection::silent_write_seen:
      return "silent_write_seen";
    case Protection::written_back:
      return "written_back";
    case Protection::living_written_back:
      return "living_written_back";
    case Protection::written_before_read:
      return "written_before_read";
    case Protection::untracked_alias_noted:
      return "untracked_alias_noted";
    case Protection::statistics_arrived:
      return "statistics_arrived";
    case Protection::master_wins:
      return "master_wins";
    case Protection::private_copies:
      return "private_copies";
    case Protection::saved_version_checked:
      return "saved_version_checked";
    case Protection::saved_after_compute:
      return "saved_after_compute";
    case Protection::saved_memory_held:
      return "saved_memory_held";
    case Protection::saved_written_after_copied:
      return "saved_written_after_copied";
    case Protection::saved_back_after_left:
      return "saved_back_after_left";
    case Protection::saved_copies_current:
      return "saved_copies_current";
    case Protection::capture_refused:
      return "capture_refused";
    case Protection::after_replays:
      return "after_replays";
    case Protection::count:
      break;
  }
  return "?";
}

}  // namespace dynswap::test
