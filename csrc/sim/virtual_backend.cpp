#include "sim/virtual_backend.h"

#include <algorithm>
#include <string>

#include "core/align.h"
#include "core/check.h"

namespace dynswap::sim {

/// A point of virtual time. The clock outlives its events: the engine that holds them owns the backend.
class VirtualBackend::Instant final : public Event {
 public:
  Instant(const VirtualBackend& clock, double at) : Instant(clock, at, at) {}
  Instant(const VirtualBackend& clock, double begin, double at) : clock_(clock), begin_(begin), at_(at) {}
  bool done() const noexcept override {
    const std::lock_guard lock(clock_.mutex_);
    return at_ <= clock_.present();
  }
  std::optional<Interval> when() const noexcept override {
    if (!done()) return std::nullopt;
    return Interval{nanoseconds(begin_), nanoseconds(at_)};
  }
  double at() const noexcept { return at_; }

 private:
  const VirtualBackend& clock_;
  const double begin_;
  const double at_;
};

VirtualBackend::VirtualBackend(double bytes_per_second, double latency, std::size_t cap,
                               const DeviceTraits& traits, std::optional<HostTimes> host)
    : bytes_per_second_(bytes_per_second),
      latency_(latency),
      cap_(cap),
      traits_(traits),
      host_(host),
      next_address_(std::uintptr_t{1} << 40) {
  DYNSWAP_CHECK(bytes_per_second > 0 && latency >= 0, "a bus needs a speed");
}

Memory VirtualBackend::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > cap_ - *allocated_) {
    throw OutOfMemory("the virtual device has " + std::to_string(cap_ - *allocated_) + " bytes left, not " +
                      std::to_string(bytes));
  }
  *allocated_ += bytes;
  const std::uintptr_t address = next_address_;
  next_address_ += align_up(bytes, traits_.alignment);
  return Memory(reinterpret_cast<std::byte*>(address),
                [allocated = allocated_, bytes](std::byte*) { *allocated -= bytes; });
}

void VirtualBackend::kernel(double seconds, Stream stream) {
  const std::lock_guard lock(mutex_);
  if (host_ && stream == kConsumer) host_now_ += host_->kernel;
  double& free = free_at(stream);
  free = std::max(free, present()) + seconds;
}

void VirtualBackend::wait_for_consumer() noexcept {
  const std::lock_guard lock(mutex_);
  host_now_ = std::max(host_now_, now_);
}

EventPtr VirtualBackend::copy(CopyRequest request) {
  const std::lock_guard lock(mutex_);
  for (const dynswap::Step& step : request.steps) {
    if (host_) host_now_ += host_->weight * static_cast<double>(step.pieces.size());
  }
  double end = std::max(copy_free_, present());
  double busy = latency_;
  end += latency_;
  for (const dynswap::Step& step : request.steps) {
    for (const EventPtr& event : step.after) {
      if (event) end = std::max(end, static_cast<const Instant&>(*event).at());
    }
    for (const Piece& piece : step.pieces) {
      const std::uint64_t least =
          std::min(stored_bytes(piece), piece.count * scalar_size(piece.source->wanted));
      const double bytes = copy_bytes_ ? copy_bytes_(piece) : static_cast<double>(least);
      const double seconds = bytes / bytes_per_second_;
      bytes_copied_ += static_cast<std::uint64_t>(bytes);
      end += seconds;
      busy += seconds;
    }
  }
  copying_ += busy;
  copy_free_ = end;
  ++copies_;
  return std::make_shared<Instant>(*this, end - busy, end);
}

void VirtualBackend::wait(Stream stream, const EventPtr& copied) {
  if (!copied) return;
  const double at = static_cast<const Instant&>(*copied).at();
  const std::lock_guard lock(mutex_);
  double& free = free_at(stream);
  free = std::max(free, present());
  if (stream == kConsumer) stalled_ += std::max(0.0, at - free);
  free = std::max(free, at);
}

EventPtr VirtualBackend::record(Stream stream) {
  const std::lock_guard lock(mutex_);
  return std::make_shared<Instant>(*this, std::max(free_at(stream), present()));
}

bool VirtualBackend::device_time() const noexcept {
  const std::lock_guard lock(mutex_);
  return !streams_.empty();
}

void VirtualBackend::synchronise(const EventPtr& event) noexcept {
  if (!event || event->done()) return;
  const std::lock_guard lock(mutex_);
  ++host_synchronisations_;
  now_ = std::max(now_, static_cast<const Instant&>(*event).at());
  host_now_ = std::max(host_now_, now_);
}

}  // namespace dynswap::sim
