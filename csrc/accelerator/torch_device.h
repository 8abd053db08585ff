// A device by torch's own streams and events.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "transfer/stream_device.h"

namespace dynswap {

/// One device. Both numbers of a stream, the engine's (Stream) and ours (StreamHandle), are its
/// c10::StreamId.
class TorchDevice final : public StreamDevice {
 public:
  explicit TorchDevice(const c10::Device& device) : device_(device) {}

  Entered enter() const noexcept override;
  void leave(const Entered& entered) const noexcept override;

  StreamHandle make_copy_stream() const override;
  StreamHandle handle_of(Stream consumer) const noexcept override { return consumer; }
  /// False where torch captures nothing.
  bool captured(StreamHandle stream) const override;
  void synchronise(StreamHandle stream) const override;
  DeviceEventPtr make_event(bool timed) const override;

  c10::Stream stream(StreamHandle stream) const noexcept {
    return c10::Stream(c10::Stream::UNSAFE, device_, static_cast<c10::StreamId>(stream));
  }

 private:
  const c10::Device device_;
};

}  // namespace dynswap
