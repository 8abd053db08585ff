#include "transfer/transfer_stream.h"

#include <exception>
#include <utility>

#include "core/check.h"
#include "core/protection.h"

namespace dynswap {
namespace {

constexpr std::size_t kLeastStaging = 1u << 20;

StreamOptions checked(StreamOptions options) {
  DYNSWAP_CHECK(options.allocate, "StreamOptions::allocate is not set");
  DYNSWAP_CHECK(options.staging_buffers >= 2 && options.staging_bytes >= kLeastStaging,
                "the staging ring takes two buffers of 1 MiB at least");
  return options;
}

StreamHandle stream_of(const StreamDevice& device) {
  const OnDevice scope(device);
  return device.make_copy_stream();
}

/// A deleter that lets the memory go, and knows the stream in whose order its allocator hands it out again.
struct Allocated {
  Memory memory;
  Stream stream;
  void operator()(std::byte*) noexcept { memory.reset(); }
};

}  // namespace

TransferStream::TransferStream(StreamDevicePtr device, StreamOptions options)
    : device_(std::move(device)),
      options_(checked(std::move(options))),
      events_(std::make_shared<EventPool>(device_)),
      stream_(stream_of(*device_)) {}

TransferStream::~TransferStream() {
  if (!devices_usable()) return;
  try {
    const OnDevice scope(*device_);
    device_->destroy_copy_stream(stream_);
  } catch (const std::exception&) {
    // the device is lost, and the stream with it
  }
}

Memory TransferStream::allocate(std::size_t bytes) {
  const OnDevice scope(*device_);
  StreamMemory block = options_.allocate(bytes);
  const StreamHandle stream = device_->handle_of(block.stream);
  // A graph's own pool would have it back.
  if (device_->captured(stream))
    throw DeviceError(
        "memory for weights cannot be allocated while a CUDA graph is captured: run the model once before "
        "the capture");
  // Note [Fresh memory is old memory]: a caching allocator hands out blocks whose last readers may still
  // be queued on the stream that it allocates for. Work on that stream comes after them; the copy stream
  // has to be told.
  StreamEvent freed(events_);
  freed.record(stream);
  if (PROTECTED(fresh_memory_waits)) freed.block(stream_);
  std::byte* const data = block.memory.get();
  return Memory(data, Allocated{std::move(block.memory), block.stream});
}

bool TransferStream::release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept {
  const Allocated* const allocated = std::get_deleter<Allocated>(memory);
  if (allocated == nullptr) return memory == nullptr;
  if (!devices_usable()) return false;
  try {
    const OnDevice scope(*device_);
    const StreamHandle stream = device_->handle_of(allocated->stream);
    if (device_->captured(stream)) return false;
    for (const EventPtr& event : after) {
      if (!PROTECTED(plan_goes_after_readers)) break;
      if (!event || on_stream(event).known_done()) continue;
      if (!on_stream(event).recorded()) return false;
      on_stream(event).block(stream);
    }
    return true;
  } catch (const std::exception&) {
    return false;  // the stream may be gone: it was the user's
  }
}

Stream TransferStream::order_of(const Memory& memory) noexcept {
  const Allocated* const allocated = std::get_deleter<Allocated>(memory);
  return allocated == nullptr ? 0 : allocated->stream;
}

std::unique_ptr<StagingRing> TransferStream::make_ring(const std::shared_ptr<std::byte>& block) const {
  std::vector<StagingRing::Buffer> buffers;
  for (unsigned i = 0; i < options_.staging_buffers; ++i) {
    buffers.emplace_back(block, block.get() + i * options_.staging_bytes);
  }
  return std::make_unique<StagingRing>(std::move(buffers), options_.staging_bytes,
                                       static_cast<int>(options_.readers), options_.cast);
}

void TransferStream::wait_for(const std::vector<EventPtr>& events) const {
  for (const EventPtr& event : events) {
    if (!event) continue;
    try {
      on_stream(event).wait_for_record();
    } catch (const std::exception&) {
      continue;  // it failed, and nothing of it is under way
    }
    on_stream(event).block(stream_);
  }
}

void TransferStream::begin(StreamEvent& copied) const {
  if (!copied.clock()) return;
  auto begin = make_event(copied.clock());
  begin->record(stream_);
  copied.begin = std::move(begin);
}

void TransferStream::synchronise() noexcept {
  ++host_synchronisations_;
  if (!devices_usable()) return;
  try {
    const OnDevice scope(*device_);
    device_->synchronise(stream_);
  } catch (const std::exception&) {
    // the device is lost: nothing is under way any more
  }
}

void TransferStream::synchronise(const EventPtr& event) noexcept {
  if (!event || event->done() || !devices_usable()) return;
  ++host_synchronisations_;
  try {
    on_stream(event).wait_for_record();
    on_stream(event).synchronise();
  } catch (const std::exception&) {
    // it failed, or the device is lost: nothing of it is under way any more
  }
}

}  // namespace dynswap
