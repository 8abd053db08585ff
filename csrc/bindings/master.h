// A master as it was when its bytes were copied, and how to tell that it is not that any more.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "bindings/holds.h"
#include "core/source.h"
#include "io/mappings.h"

namespace dynswap {

/// Invariant 6 (masters are the truth): a copy is handed out only while all of this is unchanged.
struct MasterState {
  const c10::TensorImpl* impl = nullptr;  ///< an identity, never dereferenced
  const c10::StorageImpl* storage = nullptr;
  const void* data = nullptr;  ///< of the storage; `share_memory()` gives it other memory
  std::int64_t storage_offset = 0;
  std::uint32_t version = 0;
  bool requires_grad = false;

  static MasterState of(const c10::TensorImpl& master) noexcept {
    const auto& version = master.version_counter();
    c10::StorageImpl* const storage = master.unsafe_storage().unsafeGetStorageImpl();
    return {&master, storage,
            // Not data(), which throws where torch wants a read to be an error.
            storage == nullptr ? nullptr : storage->_mutable_data_ptr_no_checks().get(),
            master.has_symbolic_sizes_strides() ? 0 : master.storage_offset(),
            version.enabled() ? version.current_version() : 0, master.requires_grad()};
  }

  bool operator==(const MasterState&) const noexcept = default;

  /// The tensor is the same, and its bytes are where they were (they may be other bytes).
  bool same_place(const c10::TensorImpl& master) const noexcept {
    const MasterState other = of(master);
    return impl == &master && storage == other.storage && data == other.data &&
           storage_offset == other.storage_offset;
  }

  /// The tensor is the same or an alias, and no write to its bytes is unknown.
  bool same_bytes(const c10::TensorImpl& alias) const noexcept {
    const MasterState other = of(alias);
    return storage == other.storage && data == other.data && storage_offset == other.storage_offset &&
           version == other.version;
  }
};

/// 0 for an inference tensor, which has none.
inline std::uint32_t version_of(const at::Tensor& tensor) noexcept {
  const auto& version = tensor.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? version.current_version() : 0;
}

/// What a session's weights may keep of the page cache.
struct PageCacheShare {
  std::uint64_t bytes = 0;
  Keep keep = Keep::yes;  ///< for those within these bytes
};

/// A master's bytes can be moved as they lie in memory: plain, dense, of a type that the engine knows.
bool streamable(const at::Tensor& master) noexcept;

/// Where the bytes of a streamable master are: a range of the file that it is mapped from, else RAM.
/// `wanted` is the dtype on the device (masters that do not float keep theirs). As far as `page_cache`
/// goes, and taken from it, the file's bytes may stay in the page cache. The bytes are held through `holds`.
SourcePtr source_of(const at::Tensor& master, at::ScalarType wanted, const std::string& name,
                    const Mappings& mappings, PageCacheShare& page_cache, Holds& holds);

/// The dtype that a master has on the device.
at::ScalarType wanted_type(const at::Tensor& master, std::optional<at::ScalarType> dtype) noexcept;

/// A hash of a few words spread over `bytes` at `data`: catches what changes a whole tensor without
/// bumping its version (`p.data.mul_()`), not what changes a single element.
std::uint64_t fingerprint(const void* data, std::size_t bytes) noexcept;

/// Something in this process has written to the master since it was copied, as far as can be told without
/// a version: RAM by its fingerprint, a file mapping by its copied-on-write pages.
class SilentWrites {
 public:
  SilentWrites() = default;
  explicit SilentWrites(const Source& source) { look(source); }
  /// True if something has changed since the last look.
  bool look(const Source& source);
  /// False of a mapping that nobody had written to at the last look.
  bool any() const noexcept { return seen_ != 0; }

 private:
  std::uint64_t seen_ = 0;
};

}  // namespace dynswap
