// A backend's own stream: what copies are enqueued on, and the memory that they may write.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "transfer/staging.h"
#include "transfer/stream_events.h"

namespace dynswap {

/// Device memory, and the stream in whose order its allocator handed it out.
struct StreamMemory {
  Memory memory;
  Stream stream = 0;
};

struct StreamOptions {
  /// Device memory aligned to 512 bytes, without synchronising: torch's caching allocator, say, and the
  /// stream that was current when it was asked. Throws OutOfMemory. Never called under a lock.
  std::function<StreamMemory(std::size_t bytes)> allocate;

  /// Casts elements on the host, for weights that are cast there (Note [Where a weight is cast] in
  /// transfer/copy_plan.h).
  CastFn cast = nullptr;

  /// Bytes of one buffer in the ring of pinned buffers, through which bytes go that are not in pinned memory.
  /// The ring is made for the first copy that needs it.
  std::size_t staging_bytes = kStagingBytes;
  unsigned staging_buffers = kStagingBuffers;
  unsigned readers = 4;  ///< threads that fill them
};

/// Thread-safe.
class TransferStream {
 public:
  /// Throws DeviceError if the device cannot be used.
  TransferStream(StreamDevicePtr device, StreamOptions options);
  ~TransferStream();
  TransferStream(const TransferStream&) = delete;
  TransferStream& operator=(const TransferStream&) = delete;

  const StreamDevice& device() const noexcept { return *device_; }
  const StreamDevicePtr& device_ptr() const noexcept { return device_; }
  const StreamOptions& options() const noexcept { return options_; }
  StreamHandle handle() const noexcept { return stream_; }

  /// Memory that this stream may write. Throws OutOfMemory, and DeviceError during a capture.
  Memory allocate(std::size_t bytes);
  /// Backend::release_after(), for that memory.
  bool release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept;
  /// Backend::order_of(), for that memory.
  static Stream order_of(const Memory& memory) noexcept;

  /// A ring in such a block of pinned memory, of ring_bytes().
  std::unique_ptr<StagingRing> make_ring(const std::shared_ptr<std::byte>& block) const;
  std::size_t ring_bytes() const noexcept { return options_.staging_bytes * options_.staging_buffers; }

  StreamEventPtr make_event(std::shared_ptr<const StreamClock> clock = nullptr) const {
    return std::make_shared<StreamEvent>(events_, std::move(clock));
  }
  /// Has what is enqueued from now on come after these events, waiting for those that another thread is to
  /// record. Throws DeviceError.
  void wait_for(const std::vector<EventPtr>& events) const;
  /// Notes that the copy whose end `copied` will be begins here, if it is timed. After what it waits for: the
  /// time of the readers that it waits for is not part of its own.
  void begin(StreamEvent& copied) const;

  /// Blocks the calling thread until all that is enqueued is over.
  void synchronise() noexcept;
  /// Backend::synchronise(). Of an event that is to be recorded, waits for that, too.
  void synchronise(const EventPtr& event) noexcept;
  /// Backend::host_synchronisations().
  std::uint64_t host_synchronisations() const noexcept { return host_synchronisations_; }
  void count_host_synchronisation() noexcept { ++host_synchronisations_; }

 private:
  const StreamDevicePtr device_;
  const StreamOptions options_;
  const std::shared_ptr<EventPool> events_;
  const StreamHandle stream_;
  std::atomic<std::uint64_t> host_synchronisations_{0};
};

}  // namespace dynswap
