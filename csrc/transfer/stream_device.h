// A device whose work is on streams, as its backend sees it: what differs between CUDA's runtime (cuda/) and
// torch's streams (accelerator/).
#pragma once

#include <cstdint>
#include <memory>

#include "core/backend.h"
#include "transfer/usable_devices.h"

namespace dynswap {

/// A stream, as the device's own calls name it: a cudaStream_t, a c10::StreamId.
using StreamHandle = std::uintptr_t;

/// An event of the device's runtime. A wait that was enqueued keeps the point that it saw, so recording the
/// event again later does not move it. All calls but the destructor throw DeviceError.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual void record(StreamHandle stream) = 0;
  /// Makes the stream wait for the point.
  virtual void block(StreamHandle stream) const = 0;
  /// Makes the calling thread wait for it.
  virtual void synchronise() const = 0;
  /// Whether it is passed, or will never be because the device has given up all its work.
  virtual bool passed() const = 0;
  /// From `first` to this one, both timed and passed.
  virtual double milliseconds_since(const DeviceEvent& first) const = 0;
};

/// Leaves the event to the runtime where that may not be called any more.
struct DestroyEvent {
  void operator()(DeviceEvent* event) const noexcept {
    if (devices_usable()) delete event;
  }
};
using DeviceEventPtr = std::unique_ptr<DeviceEvent, DestroyEvent>;

/// Thread-safe. All calls but those marked noexcept throw DeviceError.
class StreamDevice {
 public:
  virtual ~StreamDevice() = default;

  /// What enter() has changed for the calling thread.
  struct Entered {
    bool pushed = false;   ///< a context
    int capture_mode = 0;  ///< the thread's own meanwhile
  };
  /// Called by OnDevice alone.
  virtual Entered enter() const = 0;
  virtual void leave(const Entered& entered) const noexcept = 0;

  /// A stream for copies alone, of high priority where the device has priorities.
  virtual StreamHandle make_copy_stream() const = 0;
  virtual void destroy_copy_stream(StreamHandle) const noexcept {}
  virtual StreamHandle handle_of(Stream consumer) const = 0;
  /// Whether work on the stream goes into a graph instead of being done. Also of the default stream while
  /// another is captured that it would have to wait for.
  virtual bool captured(StreamHandle stream) const = 0;
  virtual void synchronise(StreamHandle stream) const = 0;
  virtual DeviceEventPtr make_event(bool timed) const = 0;
};

/// Around all calls of a device, which may be nested.
///
/// Note [Somebody captures a graph]: a capture in torch's default mode forbids every thread what could
/// synchronise: to ask whether an event is over, to wait for one, to allocate pinned memory. Who does it all
/// the same spoils the capture, and gets an error for an answer. Nothing of that is ever part of a capture
/// here, so each scope lets it be allowed for its thread. What is left: a stream that is captured cannot wait
/// for what is not, nor may an event be recorded on it that others ask or wait for. Backend::capturing()
/// tells.
class OnDevice {
 public:
  explicit OnDevice(const StreamDevice& device) : device_(device), entered_(device.enter()) {}
  ~OnDevice() { device_.leave(entered_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const StreamDevice& device_;
  const StreamDevice::Entered entered_;
};

}  // namespace dynswap
