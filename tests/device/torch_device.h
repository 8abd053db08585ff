// torch's face of the pretend machine: what its device guard, allocator, generators and operators share.
//
// It is compiled for one type of device: PRETEND_TYPE, which is CUDA or PrivateUse1.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "machine.h"

namespace pretend {

constexpr c10::DeviceType kType = c10::DeviceType::PRETEND_TYPE;
constexpr c10::DispatchKey kKey = c10::DispatchKey::PRETEND_TYPE;

inline c10::Device device_at(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
inline bool on_device(const at::TensorBase& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

/// Runs what may fault; torch's own error comes out.
template <class Body>
auto checked(Body body) {
  try {
    return body();
  } catch (const DeviceFault& fault) {
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, fault.code,
                                c10::DeviceTypeName(kType) + " error: " + fault.what());
  }
}

/// The calling thread's current stream on a device.
Stream& current_stream(int device) noexcept;
Stream& stream_of(const c10::Stream& stream) noexcept;
c10::Stream as_torch(Stream& stream) noexcept;
c10::Stream stream_from_pool(int device, int priority);

/// torch.cuda.set_sync_debug_mode: 0 default, 1 warn, 2 error.
int& sync_debug_mode() noexcept;
/// What torch does before its own synchronisations.
void note_synchronisation();

/// torch's caching allocator, as far as its order goes: memory that is freed is handed out again to the
/// stream that it was allocated for, at once; after `record_stream`, when that stream has come so far.
class Allocator : public c10::DeviceAllocator {
 public:
  virtual void set_cap(int device, std::size_t bytes) = 0;
  virtual std::size_t cap(int device) const = 0;
  virtual std::size_t total(int device) const = 0;
  /// As torch.cuda.caching_allocator_enable() sets it.
  virtual bool& caching_enabled() = 0;
};
Allocator& allocator();
/// Given back when the copies that were asked of it are over.
at::Allocator& pinned_allocator();

/// Gives storage on the device memory of that size, with what it held as far as there is room.
void resize_storage(const c10::Storage& storage, std::size_t bytes);

/// A queued copy on `stream` uses this host memory, whose storage has that context. If torch takes it for its
/// own pinned memory, it lasts until then.
void note_pinned_use(const void* address, const void* context, Stream& stream);

/// A CPU generator for the next random operator, seeded by one of the device, which it advances. Its default
/// one if none is given.
at::Generator draw(const std::optional<at::Generator>& generator, int device);
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

}  // namespace pretend
