#include "accelerator/torch_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "accelerator/device_runtime.h"

namespace dynswap {

Stream handle_of(const c10::Stream& stream) { return static_cast<Stream>(stream.id()); }

Stream native_handle(const c10::Device& device, Stream stream) {
  const c10::Stream known(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(stream));
  return reinterpret_cast<Stream>(known.native_handle());
}

Stream current_stream(const c10::Device& device) {
  return device.is_cpu() ? 0 : handle_of(torch_stream(device));
}

c10::Stream torch_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

bool capturing(const c10::Device& device) { return !device.is_cpu() && is_captured(torch_stream(device)); }

}  // namespace dynswap
