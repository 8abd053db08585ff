// What happened and when, kept while somebody wants to know.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/backend.h"
#include "core/figures.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// One thing that happened.
struct Span {
  enum class Kind : std::uint8_t {
    copy,      ///< a group's bytes travelled
    copy_out,  ///< a short-lived group's bytes travelled away from the device
    wait,      ///< a consumer waited for them
    use,       ///< a consumer had them from here on
    pass,      ///< the model's call began
  };
  Kind kind = Kind::use;
  std::uint32_t group = 0;
  Interval when{};
  Cause cause = Cause::bus_bound;  ///< wait
  bool demanded = false;           ///< copy: issued when it was needed already
  std::uint64_t bytes = 0;         ///< that travelled; use: that the engine held on the device
  std::uint64_t saved_bytes = 0;   ///< use: of tensors saved for backward, on the device
  std::uint64_t thread = 0;        ///< the consumer's
};

/// What tells why a wait was one, once it is over.
struct Lateness {
  bool prefetched = false;         ///< the copy had been issued before it was needed
  std::optional<Cause> held_back;  ///< what kept it from being issued before that
  EventPtr copied;                 ///< its end
  EventPtr behind;                 ///< the end of the copy that was issued before it; may be null
};

/// The cause of a wait that took `stalled_ns`: Note [Why a wait was one].
Cause why(const Lateness& late, std::int64_t stalled_ns);

struct Timeline {
  std::vector<Span> spans;    ///< in the order of their beginnings
  std::uint64_t dropped = 0;  ///< that there was no room for
};

/// Thread-safe. Off, it costs its callers one load. What it keeps are events, so nothing waits for a
/// device; times are read when somebody asks.
class Recorder {
 public:
  bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  /// Forgets what was recorded, and begins.
  void begin();
  void end() noexcept { on_.store(false); }

  void copied_out(std::uint32_t group, EventPtr from, EventPtr to, std::uint64_t bytes);
  void copied(std::uint32_t group, EventPtr copy, bool demanded, std::uint64_t bytes);
  void waited(std::uint32_t group, EventPtr from, EventPtr to, Lateness late);
  void used(std::uint32_t group, EventPtr at, std::uint64_t held_bytes, std::uint64_t saved_bytes);
  void pass(EventPtr at);

  /// The ends of what was recorded.
  std::vector<EventPtr> ends() const;
  /// What is over by now of what was recorded.
  Timeline timeline() const;

 private:
  static constexpr std::size_t kMost = 1u << 18;

  struct Entry {
    Span span;
    EventPtr from, to;  ///< `from`: of a wait and of a copy out
    std::optional<Lateness> late;
  };
  void add(Entry entry);

  struct Recorded {
    Mutex mutex;
    std::vector<Entry> entries;  ///< LOCK: mutex
    std::uint64_t dropped = 0;   ///< LOCK: mutex
  };

  std::atomic<bool> on_{false};
  mutable PerProcess<Recorded> recorded_;  ///< a forked child has recorded nothing
};

}  // namespace dynswap
