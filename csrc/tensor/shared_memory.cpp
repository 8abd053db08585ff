#include "tensor/shared_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include "platform/fork_safe.h"
#include "platform/memory.h"

namespace dynswap {

namespace {

struct Mapping {
  void* address;
  std::size_t bytes;
};

/// What is mapped, by its addresses.
struct Mapped {
  struct Place {
    std::size_t bytes;
    std::uint64_t inode, offset;
  };
  Mutex mutex;
  std::map<const std::byte*, Place> all;  ///< LOCK: mutex
};

Mapped& mapped() {
  static auto* const of_this_process = new Mapped;
  return *of_this_process;
}

void unmap(void* context) noexcept {
  const std::unique_ptr<Mapping> mapping(static_cast<Mapping*>(context));
  {
    const std::lock_guard lock(mapped().mutex);
    mapped().all.erase(static_cast<const std::byte*>(mapping->address));
  }
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
  {
    const std::lock_guard lock(mapped().mutex);
    mapped().all[static_cast<const std::byte*>(address)] = {bytes, inode_of(file), offset};
  }
  c10::DataPtr data(address, mapping.release(), &unmap, c10::kCPU);
  const auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                            /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, at::kByte).set_(c10::Storage(storage), 0, {static_cast<std::int64_t>(bytes)}, {1});
}

std::optional<SharedPlace> shared_place(const std::byte* address, std::size_t bytes) {
  const std::lock_guard lock(mapped().mutex);
  auto found = mapped().all.upper_bound(address);
  if (found == mapped().all.begin()) return std::nullopt;
  const auto& [begin, place] = *--found;
  const auto offset = static_cast<std::size_t>(address - begin);
  if (place.inode == 0 || offset + bytes > place.bytes) return std::nullopt;
  return SharedPlace{place.inode, place.offset + offset};
}

bool frees_shared_memory(void (*deleter)(void*)) noexcept { return deleter == &unmap; }

}  // namespace dynswap
