#include "accelerator/torch_device.h"

#include <c10/core/Event.h>

#include "accelerator/capabilities.h"
#include "accelerator/device_runtime.h"
#include "accelerator/torch_calls.h"
#include "transfer/device_errors.h"

namespace dynswap {
namespace {

class TorchEvent final : public DeviceEvent {
 public:
  TorchEvent(const TorchDevice& device, c10::DeviceType type, bool timed)
      : device_(device),
        event_(type, timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT) {}

  void record(StreamHandle stream) override {
    torch_calls([&] { event_.record(device_.stream(stream)); });
  }
  void block(StreamHandle stream) const override {
    torch_calls([&] { event_.block(device_.stream(stream)); });
  }
  void synchronise() const override {
    torch_calls([&] { event_.synchronize(); });
  }
  bool passed() const override {
    try {
      return event_.query();  // not as torch_calls(), which keeps no code
    } catch (const c10::AcceleratorError& error) {
      // Whatever else keeps the question from being answered says nothing about the work before the event.
      return ends_all_work(error.get_error_code());
    }
  }
  double milliseconds_since(const DeviceEvent& first) const override {
    return torch_calls([&] { return static_cast<const TorchEvent&>(first).event_.elapsedTime(event_); });
  }

 private:
  const TorchDevice& device_;
  c10::Event event_;
};

}  // namespace

StreamDevice::Entered TorchDevice::enter() const noexcept {
  return {false, exchange_capture_mode(kRelaxedCapture)};
}

void TorchDevice::leave(const Entered& entered) const noexcept {
  (void)exchange_capture_mode(entered.capture_mode);
}

StreamHandle TorchDevice::make_copy_stream() const {
  return torch_calls([&] { return static_cast<StreamHandle>(copy_stream(device_).id()); });
}

bool TorchDevice::captured(StreamHandle of) const {
  return torch_calls([&] { return is_captured(stream(of)); });
}

void TorchDevice::synchronise(StreamHandle of) const {
  torch_calls([&] { guard_of(device_).synchronizeStream(stream(of)); });
}

DeviceEventPtr TorchDevice::make_event(bool timed) const {
  return torch_calls([&] { return DeviceEventPtr(new TorchEvent(*this, device_.type(), timed)); });
}

}  // namespace dynswap
