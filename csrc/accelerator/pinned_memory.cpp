#include "accelerator/pinned_memory.h"

#include <ATen/Context.h>
#include <c10/core/Allocator.h>

#include <bit>
#include <exception>
#include <string>
#include <utility>

#include "accelerator/torch_calls.h"
#include "io/aligned_buffer.h"
#include "transfer/page_locking.h"
#include "transfer/usable_devices.h"

namespace dynswap {
namespace {

/// Takes torch's memory, and frees it unless the runtime may not be called any more.
std::shared_ptr<std::byte> owned(c10::DataPtr memory) {
  struct Release {
    void operator()(c10::DataPtr* held) const noexcept {
      if (devices_usable()) delete held;
    }
  };
  const std::shared_ptr<c10::DataPtr> owner(new c10::DataPtr(std::move(memory)), Release());
  return {owner, static_cast<std::byte*>(owner->get())};
}

std::shared_ptr<std::byte> pinned_block(const c10::Device& device, std::size_t bytes) {
  return torch_calls(
      [&] { return owned(at::globalContext().getPinnedMemoryAllocator(device.type())->allocate(bytes)); });
}

class TorchPageLocker final : public PageLocker {
 public:
  TorchPageLocker(const c10::Device& device, const HostRegister& host_register)
      : device_(device), host_register_(host_register) {}

  bool is_locked(const std::byte* byte) override {
    return torch_calls([&] { return at::globalContext().isPinnedPtr(byte, device_.type()); });
  }

  std::string locks_nothing() const override {
    if (host_register_) return {};
    return "torch cannot page-lock memory in place for devices of the type '" +
           c10::DeviceTypeName(device_.type(), /*lower_case=*/true) + "'";
  }

  std::shared_ptr<void> lock(std::byte* block, std::size_t bytes, std::string& reason) override {
    return host_register_ ? host_register_(block, bytes, reason) : nullptr;
  }

  std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string& reason) override {
    try {
      return pinned_block(device_, bytes);
    } catch (const Error& error) {
      reason = error.what();
      return nullptr;
    }
  }

  /// As torch's allocator.
  std::size_t taken(std::size_t bytes) const override { return std::bit_ceil(bytes); }

 private:
  const c10::Device device_;
  const HostRegister& host_register_;
};

}  // namespace

bool has_pinned_memory(const c10::Device& device) noexcept {
  try {
    const auto block = pinned_block(device, 1);
    return at::globalContext().isPinnedPtr(block.get(), device.type());
  } catch (const std::exception&) {
    return false;
  }
}

std::shared_ptr<std::byte> staging_memory(const c10::Device& device, bool pinned, std::size_t bytes) {
  if (pinned) return pinned_block(device, bytes);
  const auto block = std::make_shared<AlignedBuffer>(bytes);
  return {block, block->data()};
}

std::string pin_through_torch(const c10::Device& device, const HostRegister& host_register,
                              PinnedCopies& copies, std::vector<Lockable>& items) {
  if (!has_pinned_memory(device)) {
    return "torch has no pinned memory for devices of the type '" +
           c10::DeviceTypeName(device.type(), /*lower_case=*/true) +
           "': weights go there through a small buffer, in copies that each wait for the one before. Pass "
           "host_budget='minimum' to install(), which page-locks nothing, to accept this without this "
           "warning";
  }
  watch_process();
  TorchPageLocker locker(device, host_register);
  return page_lock(locker, copies, items);
}

}  // namespace dynswap
