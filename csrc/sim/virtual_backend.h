// A device that only keeps time: the real engine, on a virtual clock, gives the same figures anywhere.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "core/backend.h"
#include "platform/fork_safe.h"

namespace dynswap::sim {

/// The only stream that uses weights.
inline constexpr Stream kConsumer = 0;

/// The time that the host takes to enqueue work, in seconds.
struct HostTimes {
  double weight = 0;  ///< for each weight of a copy, before the copy can begin
  double kernel = 0;  ///< for what a call computes, before it can begin
};

/// One copy stream, one consumer, and as many other streams as are named. By default the host keeps pace with
/// the consumer and takes no time: a copy is issued, and so begins, no earlier than the consumer's present.
/// With HostTimes the host has a time of its own, and runs ahead of the consumer until it waits for it.
/// Copies run one after the other in the order of issue; a step waits for its `after`, and what is behind it
/// waits too, as on a stream. Memory is addresses and a cap; nothing is ever read or written. Thread-safe,
/// but the figures are the same each time only if one thread at a time calls it, in the same order.
class VirtualBackend final : public Backend {
 public:
  /// `latency`: seconds that each copy takes besides its bytes. `traits`: those of the device it stands for.
  VirtualBackend(double bytes_per_second, double latency,
                 std::size_t cap = std::numeric_limits<std::size_t>::max(),
                 const DeviceTraits& traits = kAcceleratorTraits,
                 std::optional<HostTimes> host = std::nullopt);

  /// Bytes that a piece takes on the bus. Unset: its elements, in the smaller of the stored and the wanted
  /// type.
  using CopyBytes = std::function<double(const Piece&)>;
  void set_copy_bytes(CopyBytes copy_bytes) { copy_bytes_ = std::move(copy_bytes); }

  /// The stream works for `seconds`.
  void kernel(double seconds, Stream stream = kConsumer);
  /// The host waits until the consumer has done all that it was given.
  void wait_for_consumer() noexcept;

  double seconds() const noexcept { return read(now_); }
  double stalled() const noexcept { return read(stalled_); }  ///< seconds the consumer waited for copies
  double copying() const noexcept { return read(copying_); }  ///< seconds the copy stream was at work
  std::uint64_t bytes_copied() const noexcept { return read(bytes_copied_); }
  std::uint64_t copies() const noexcept { return read(copies_); }
  std::size_t allocated_bytes() const noexcept { return *allocated_; }

  const char* name() const noexcept override { return "virtual"; }
  const DeviceTraits& traits() const noexcept override { return traits_; }
  Memory allocate(std::size_t bytes) override;
  EventPtr copy(CopyRequest request) override;
  void wait(Stream stream, const EventPtr& copied) override;
  EventPtr record(Stream stream) override;
  std::int64_t now() const noexcept override { return nanoseconds(seconds()); }
  /// The consumer alone is in step with the host.
  bool device_time() const noexcept override;
  EventPtr mark(Stream stream) override { return record(stream); }
  void close() noexcept override {}
  void synchronise(const EventPtr& event) noexcept override;
  std::uint64_t host_synchronisations() const noexcept override { return read(host_synchronisations_); }

 private:
  class Instant;
  template <class T>
  T read(const T& value) const noexcept {
    const std::lock_guard lock(mutex_);
    return value;
  }
  /// The host's present: what it asks for now begins no earlier. LOCK: mutex_ is held.
  double present() const noexcept { return host_ ? host_now_ : now_; }
  /// When a stream has done what it was given. LOCK: mutex_ is held.
  double& free_at(Stream stream) { return stream == kConsumer ? now_ : streams_[stream]; }
  static std::int64_t nanoseconds(double seconds) noexcept {
    return static_cast<std::int64_t>(seconds * 1e9);
  }

  const double bytes_per_second_;
  const double latency_;
  const std::size_t cap_;
  const DeviceTraits traits_;
  const std::optional<HostTimes> host_;
  CopyBytes copy_bytes_;
  mutable Mutex mutex_;
  // LOCK: mutex_, all below.
  double now_ = 0;                    ///< of the consumer
  std::map<Stream, double> streams_;  ///< the others' free_at()
  double host_now_ = 0;               ///< of the host, if it has a time of its own
  double copy_free_ = 0;              ///< when the copy stream has done what it was given
  double stalled_ = 0;
  double copying_ = 0;
  std::uint64_t bytes_copied_ = 0;
  std::uint64_t copies_ = 0;
  std::uint64_t host_synchronisations_ = 0;
  std::uintptr_t next_address_;
  /// Memory may outlive us.
  std::shared_ptr<std::atomic<std::size_t>> allocated_ = std::make_shared<std::atomic<std::size_t>>(0);
};

}  // namespace dynswap::sim
