#include "tensor/shared_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <cerrno>
#include <memory>
#include <system_error>
#include <utility>

#include "platform/memory.h"

namespace dynswap {

namespace {

struct Mapping {
  void* address;
  std::size_t bytes;
};

void unmap(void* context) noexcept {
  const std::unique_ptr<Mapping> mapping(static_cast<Mapping*>(context));
  unmap_memory(mapping->address, mapping->bytes);
}

}  // namespace

at::Tensor map_shared_tensor(int file, std::uint64_t offset, std::size_t bytes) {
  auto mapping = std::make_unique<Mapping>();
  mapping->address = map_shared(file, offset, bytes);
  TORCH_CHECK(mapping->address != nullptr, "cannot map ", bytes,
              " bytes of shared memory: ", std::generic_category().message(errno));
  mapping->bytes = bytes;
  void* const address = mapping->address;
  c10::DataPtr data(address, mapping.release(), &unmap, c10::kCPU);
  const auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                            /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, at::kByte).set_(c10::Storage(storage), 0, {static_cast<std::int64_t>(bytes)}, {1});
}

bool frees_shared_memory(void (*deleter)(void*)) noexcept { return deleter == &unmap; }

}  // namespace dynswap
