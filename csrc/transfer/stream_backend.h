// The backend over a device with streams: memory, a copy stream, events, and nothing that makes the host
// wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "platform/fork_safe.h"
#include "transfer/transfer_stream.h"

namespace dynswap {

/// Enqueues copies on a TransferStream. Thread-safe.
class CopyIssuer {
 public:
  virtual ~CopyIssuer() = default;

  /// Enqueues the request, now or when its bytes have been read, and records `copied` after it. Within an
  /// OnDevice. If it throws, the stream may have something of the request, and nobody else.
  virtual void issue(const CopyRequest& request, const StreamEventPtr& copied) = 0;

  /// Waits until what a copy reads has been read. Throws why it could not be.
  virtual void wait(const Reads& reads) = 0;

  /// Fails what was not enqueued. The stream is to be synchronised after it and before this object goes.
  virtual void close() noexcept = 0;
  /// Gives device memory back, once the stream is idle and nothing is issued any more.
  virtual void release_memory() noexcept {}
};

class StreamBackend final : public Backend {
 public:
  StreamBackend(const char* name, std::shared_ptr<TransferStream> stream, std::unique_ptr<CopyIssuer> issuer);
  ~StreamBackend() override;

  const char* name() const noexcept override { return name_; }
  const DeviceTraits& traits() const noexcept override { return kAcceleratorTraits; }
  Memory allocate(std::size_t bytes) override { return stream_->allocate(bytes); }
  bool release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept override {
    return stream_->release_after(memory, after);
  }
  Stream order_of(const Memory& memory) const noexcept override { return TransferStream::order_of(memory); }
  EventPtr copy(CopyRequest request) override;
  void wait(Stream consumer, const EventPtr& copied) override;
  EventPtr record(Stream consumer) override;
  bool capturing(Stream consumer) const noexcept override;
  void keep_times(bool keep) override;
  bool device_time() const noexcept override { return true; }
  EventPtr mark(Stream consumer) override;
  void close() noexcept override;
  void synchronise(const EventPtr& event) noexcept override { stream_->synchronise(event); }
  std::uint64_t host_synchronisations() const noexcept override { return stream_->host_synchronisations(); }

 private:
  /// Keeps what a copy reads until it is over.
  struct InFlight {
    StreamEventPtr copied;
    std::vector<Step> steps;
  };

  const StreamDevice& device() const noexcept { return stream_->device(); }
  std::shared_ptr<const StreamClock> clock() const;
  EventPtr record(Stream consumer, std::shared_ptr<const StreamClock> clock);
  void reap() noexcept;

  const char* const name_;
  const std::shared_ptr<TransferStream> stream_;
  std::unique_ptr<CopyIssuer> issuer_;

  std::atomic<bool> closed_{false};
  std::atomic<int> copying_{0};  ///< threads inside copy()

  mutable Mutex mutex_;
  std::deque<InFlight> in_flight_;            ///< LOCK: mutex_
  std::shared_ptr<const StreamClock> clock_;  ///< LOCK: mutex_; null: times are not kept
};

}  // namespace dynswap
