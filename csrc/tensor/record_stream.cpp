#include "tensor/record_stream.h"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>
#include <optional>

#include "accelerator/torch_stream.h"
#include "tensor/handed_out.h"
#include "tensor/leased_storage.h"

namespace dynswap {

namespace {

/// Note [Used on a stream that never asked]: a tensor that is handed out on one stream may be used on
/// another, if the user lets that one wait and says so by record_stream(). torch's allocator passes over
/// memory that is not its own, so the slot would be written while it is read. The memory knows no hook, and
/// views have to be heard of as well, so the operator's kernel for the device is replaced: by one that asks
/// whose the storage is, and does for all others what torch's does, which is this call.
void record_stream(at::Tensor& tensor, at::Stream stream) {
  const c10::Storage& storage = tensor.storage();
  if (HandedOut* const record = HandedOut::of(*storage.unsafeGetStorageImpl())) {
    record->record_stream(stream);
  } else if (Lease* const lease = lease_of(*storage.unsafeGetStorageImpl())) {
    lease->add_reader(handle_of(stream));
  } else {
    c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(storage.data_ptr(), stream);
  }
}

/// torch warns, once in a process, that a kernel is replaced.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

void hear_of_record_stream(c10::DeviceType type) {
  // For good: a tensor may outlive its install, and the process be at its end when this would go.
  // LOCK: the GIL.
  static auto* const libraries = new std::map<c10::DispatchKey, torch::Library*>();
  const c10::DispatchKey key = c10::computeDispatchKey(std::nullopt, std::nullopt, c10::Device(type));
  if (!libraries->try_emplace(key, nullptr).second) return;
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto* const made = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  made->impl("record_stream", TORCH_FN(record_stream));
  (*libraries)[key] = made;
}

}  // namespace dynswap
