// The seam to a device. One engine runs over every implementation: host/ (worker threads and RAM), cuda/,
// accelerator/ (torch's streams), sim/ (a virtual clock), and two in tests/cpp.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "core/source.h"

namespace dynswap {

/// A consumer's stream, as torch numbers the streams of a device (0 is the default stream). Ignored on the
/// host.
using Stream = std::uintptr_t;

/// Nanoseconds of the host's monotonic clock, which Python calls time.monotonic_ns().
inline std::int64_t monotonic_ns() noexcept {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

/// Nanoseconds of Backend::now()'s clock.
struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// A point in the work of one stream, fixed when it was recorded: recording another event later does
/// not move it.
class Event {
 public:
  virtual ~Event() = default;
  /// True once everything before the point is complete. Never blocks. Thread-safe.
  virtual bool done() const noexcept = 0;
  /// When the copy ran that it is the end of, or (begin and end alike) when a mark was passed. Nothing before
  /// it is done, and where the backend took no time. Not under a lock.
  virtual std::optional<Interval> when() const noexcept { return std::nullopt; }
  /// How many bytes of masters a copy reads, where these are not all of the request's.
  virtual std::optional<std::uint64_t> bytes_read() const noexcept { return std::nullopt; }
};

/// Null stands for "already complete".
using EventPtr = std::shared_ptr<Event>;

/// Device memory. The last owner frees it, and may do so only after every event that uses it is done.
using Memory = std::shared_ptr<std::byte>;

/// A run of elements of one source, and where on the device they shall be.
struct Piece {
  SourcePtr source;
  std::uint64_t first = 0;  ///< first element
  std::uint64_t count = 0;  ///< elements
  std::byte* dst = nullptr;
};

/// Bytes of the master that a piece is read from.
inline std::uint64_t stored_bytes(const Piece& piece) noexcept {
  return piece.source->stored_range(piece.first, piece.count).bytes();
}

/// Pieces that may be written once `after` is complete.
struct Step {
  std::vector<EventPtr> after;
  std::vector<Piece> pieces;
};

/// All weights of a group, and the one run of device memory to which they are copied.
struct WholeGroup {
  struct Part {
    SourcePtr source;
    std::size_t offset = 0;  ///< bytes from `base`
  };
  std::uint32_t group = 0;
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  std::vector<Part> parts;
};

/// One group's copy. Steps carry their own waits, so that a large group can begin to arrive in memory
/// whose earlier parts are already free.
struct CopyRequest {
  std::vector<Step> steps;
  bool demanded = false;            ///< somebody waits for it now: go before copies that were prefetched
  std::optional<WholeGroup> whole;  ///< if the backend asks_for_whole_groups(), and it is one
};

/// What a plan has to know of a device: how weights lie in its memory, and what a copy to it costs. A backend
/// answers with them, and plans are foretold from them without a device.
struct DeviceTraits {
  /// Alignment in bytes of every slot, a power of two.
  std::size_t alignment = 512;
  /// Alignment in bytes of every weight within its slot, a power of two, no more than `alignment`: as the
  /// device's own allocations have it, so that kernels choose as they would for those.
  std::size_t weight_alignment = 512;
  /// Ranges of a file from this size on are read straight into place, and keep their phase; 0: none does.
  std::size_t in_place_bytes = 0;
  /// To begin a copy takes as long as to copy about so many bytes.
  std::size_t copy_overhead_bytes = 128u << 10;

  /// Where in its slot a weight would best begin, modulo `alignment` (a file range that is read straight
  /// into place has to keep its phase within a disk sector). Nothing if it does not matter.
  std::optional<std::size_t> phase(const Source& source) const noexcept {
    const bool in_place = source.from_files() && in_place_bytes > 0 && !source.converted() &&
                          source.stored_bytes() >= in_place_bytes && source.offset % weight_alignment == 0;
    if (!in_place) return std::nullopt;
    return source.offset % alignment;
  }
};

/// The traits of an accelerator: the alignment that torch's allocator gives, which is more than any kernel
/// asks, and 5 to 10 us of a bus.
inline constexpr DeviceTraits kAcceleratorTraits{};

/// All calls are thread-safe. Under the engine's lock only order_of() and host_synchronisations() are called,
/// which neither block nor allocate.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const noexcept = 0;

  /// What a plan has to know of the device; does not change.
  virtual const DeviceTraits& traits() const noexcept = 0;

  /// Whether copy() wants to know which requests are of whole groups in the arena.
  virtual bool asks_for_whole_groups() const noexcept { return false; }

  /// Blocks of device memory, aligned to traits().alignment. Throws OutOfMemory. Does not synchronise.
  virtual Memory allocate(std::size_t bytes) = 0;

  /// To be called before memory from allocate() is let go whose users may not be done: whoever is given it
  /// next comes after `after`, and nobody waits here. False if that cannot be had: then it has to be kept
  /// until they are done.
  virtual bool release_after(const Memory&, const std::vector<EventPtr>& /*after*/) noexcept { return false; }

  /// The stream in whose order memory from allocate() is handed out again once it is let go; 0 where there
  /// are no streams.
  virtual Stream order_of(const Memory&) const noexcept { return 0; }

  /// Enqueues a copy and returns the event of its end. Does not block on the copy, unless that takes no
  /// longer than to enqueue it. The pieces' sources are kept alive until the copy is over. Copies are not
  /// ordered among themselves except by `after`. A copy that fails (a read error) completes its event, though
  /// not before all of its steps' `after` are complete, since the next to write there waits for this copy
  /// alone; wait() on it then throws.
  virtual EventPtr copy(CopyRequest request) = 0;

  /// Makes all later work of `consumer` wait for `copied`, an event of copy(). A device with streams of
  /// its own does not block the calling thread, unless capturing(consumer); the host, whose consumer is the
  /// calling thread, does.
  /// Throws what made the copy fail (SourceError, DeviceError).
  virtual void wait(Stream consumer, const EventPtr& copied) = 0;

  /// An event at the end of what `consumer` has been given so far. May be null (see EventPtr). Not while
  /// capturing(consumer).
  virtual EventPtr record(Stream consumer) = 0;

  /// Whether what `consumer` is given goes into a graph, to be done another time: there is no point of it now
  /// that anybody could wait for.
  virtual bool capturing(Stream /*consumer*/) const noexcept { return false; }

  /// The calling thread's time, in nanoseconds: of the monotonic clock, where time is real.
  virtual std::int64_t now() const noexcept { return monotonic_ns(); }

  /// Whether the events made from now on shall know when they happened. Where that costs nothing they always
  /// do.
  virtual void keep_times(bool) {}

  /// Whether consumers are streams that wait in the device's time: then only mark() shows how long they did.
  virtual bool device_time() const noexcept { return false; }

  /// An event that records when `consumer` passes it; null if only the device's own clock could tell that,
  /// and keep_times(true) was not called.
  virtual EventPtr mark(Stream) { return nullptr; }

  /// Blocks the calling thread until every copy is over, drops those that have not begun and that no
  /// consumer was made to wait for, and stops the backend's threads. Later copies fail. Called once, from any
  /// thread, never in the steady state.
  virtual void close() noexcept = 0;

  /// Blocks the calling thread until `event` is done. Tear-down only, never in the steady state.
  virtual void synchronise(const EventPtr& event) noexcept {
    while (event && !event->done()) std::this_thread::yield();
  }

  /// How often the calling thread was made to wait for the device other than by wait().
  virtual std::uint64_t host_synchronisations() const noexcept = 0;
};

}  // namespace dynswap
