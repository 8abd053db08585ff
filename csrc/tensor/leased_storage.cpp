#include "tensor/leased_storage.h"

#include <memory>
#include <utility>

namespace dynswap {

namespace {

void end_lease(void* lease) { delete static_cast<Lease*>(lease); }

}  // namespace

c10::Storage leased_storage(Lease lease, std::size_t bytes, const c10::Device& device) {
  auto kept = std::make_unique<Lease>(std::move(lease));
  std::byte* const data = kept->data();
  return {c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, kept.release(), &end_lease, device),
          /*allocator=*/nullptr, /*resizable=*/false};
}

Lease* lease_of(const c10::StorageImpl& storage) noexcept {
  const c10::DataPtr& data = storage.data_ptr();
  return data.get_deleter() == &end_lease ? static_cast<Lease*>(data.get_context()) : nullptr;
}

}  // namespace dynswap
