// A master as it was when its bytes were copied, and how to tell that it is not that any more.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "accelerator/plain_torch.h"
#include "core/source.h"
#include "io/elements.h"
#include "io/memory_watch.h"
#include "platform/mappings.h"
#include "tensor/master_memory.h"

namespace dynswap {

/// A master's storage, and where its memory begins, which changes when the storage is resized; null where
/// there is none.
inline std::pair<const c10::StorageImpl*, const void*> memory_of(const c10::TensorImpl& master) noexcept {
  c10::StorageImpl* const storage = master.unsafe_storage().unsafeGetStorageImpl();
  // Not data(), which throws where torch wants a read to be an error.
  return {storage, storage == nullptr ? nullptr : storage->_mutable_data_ptr_no_checks().get()};
}

/// Views whose elements are not what their bytes are: of a conjugate, or of its imaginary part, which torch
/// negates where it reads them. A copy has neither.
constexpr c10::DispatchKeySet kLazyViews({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

/// Invariant 6 (masters are the truth): a copy is handed out only while all of this is unchanged.
struct MasterState {
  const c10::TensorImpl* impl = nullptr;  ///< an identity, never dereferenced
  const c10::StorageImpl* storage = nullptr;
  const void* data = nullptr;  ///< of the storage; `share_memory()` moves it
  std::int64_t storage_offset = 0;
  std::uint32_t version = 0;
  bool requires_grad = false;
  at::ScalarType type = at::kByte;
  c10::DispatchKeySet views;  ///< of kLazyViews, those that it is
  c10::DimVector sizes, strides;

  static MasterState of(const c10::TensorImpl& master) {
    const auto& version = master.version_counter();
    const auto [storage, data] = memory_of(master);
    return {&master,
            storage,
            data,
            offset_of(master),
            version.enabled() ? version.current_version() : 0,
            master.requires_grad(),
            c10::typeMetaToScalarType(master.dtype()),
            master.key_set() & kLazyViews,
            layout_of(master, &c10::TensorImpl::sizes),
            layout_of(master, &c10::TensorImpl::strides)};
  }

  /// Whether nothing has changed since. Faster than making a second state to compare.
  bool is_of(const c10::TensorImpl& master) const noexcept {
    const auto& counter = master.version_counter();
    return same_place(master) && version == (counter.enabled() ? counter.current_version() : 0) &&
           requires_grad == master.requires_grad() && same_layout(master);
  }

  /// Whether the bytes mean the same elements. `p.data = p.data.t()` changes that, but not the place, and so
  /// does `p.data = p.data.conj()`.
  bool same_layout(const c10::TensorImpl& master) const noexcept {
    return type == c10::typeMetaToScalarType(master.dtype()) && views == (master.key_set() & kLazyViews) &&
           (!has_sizes(master) || (master.sizes() == sizes && master.strides() == strides));
  }

  /// Whether tensor, memory and layout are those of `other`; the content may have changed.
  bool same_elements(const MasterState& other) const noexcept {
    return impl == other.impl && storage == other.storage && data == other.data &&
           storage_offset == other.storage_offset && type == other.type && views == other.views &&
           sizes == other.sizes && strides == other.strides;
  }

  /// Whether the tensor is the same and its memory is where it was; its content may have changed.
  bool same_place(const c10::TensorImpl& master) const noexcept {
    return impl == &master && same_memory(master);
  }

  /// Whether the tensor, which may be an alias, has the same memory, and no version has been bumped since.
  bool same_bytes(const c10::TensorImpl& alias) const noexcept {
    const auto& counter = alias.version_counter();
    return same_memory(alias) && version == (counter.enabled() ? counter.current_version() : 0);
  }

 private:
  static bool has_sizes(const c10::TensorImpl& master) noexcept {
    return !master.has_symbolic_sizes_strides() && has_layout(master);
  }

  static c10::DimVector layout_of(const c10::TensorImpl& master,
                                  at::IntArrayRef (c10::TensorImpl::*part)() const) {
    if (!has_sizes(master)) return {};
    return c10::DimVector((master.*part)());
  }

  static std::int64_t offset_of(const c10::TensorImpl& master) noexcept {
    return has_sizes(master) ? master.storage_offset() : 0;
  }

  bool same_memory(const c10::TensorImpl& master) const noexcept {
    return std::pair(storage, data) == memory_of(master) && storage_offset == offset_of(master);
  }
};

/// 0 for an inference tensor, which has none.
inline std::uint32_t version_of(const at::Tensor& tensor) noexcept {
  const auto& version = tensor.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? version.current_version() : 0;
}

/// A master's bytes can be moved as they lie in memory: plain, dense, of a type that the engine knows.
bool streamable(const at::Tensor& master);

/// torch can copy a master's bytes, and copy them back: in RAM, plain and strided, each element once, of a
/// type that the engine knows, however they lie, also where it conjugates or negates what it reads.
bool copyable(const at::Tensor& master);

/// A strided tensor's memory has its elements and nothing else, as they are.
bool lies_as_copy(const at::Tensor& tensor);

/// The strides of a master's copy: its own if it is dense, else those that `.to()` gives its copies.
c10::DimVector strides_of_copy(const at::Tensor& master);

/// Where a copyable master's elements are.
Elements elements_of(const at::Tensor& master);

/// What watches a copyable master's bytes. `mapped`: from a file.
std::shared_ptr<MemoryWatch> watch_of(const at::Tensor& master, bool mapped);

/// Whether a master's memory is mapped from a file (Note [A mapping outlives its file's end]).
bool is_mapped(const at::Tensor& master, const Mappings& mappings);

/// A copy of a mapped master's bytes in ordinary memory, as the same kind of view. `who` is its name. Throws
/// SourceError if the memory is gone. Runs under PlainTorch.
at::Tensor read_master(const at::Tensor& master, const std::string& who);
/// Writes such a copy, of a master that lies_as_copy(), to its memory. Throws SourceError.
void write_master(const at::Tensor& master, const at::Tensor& copy, const std::string& who);

/// Where the bytes of a streamable master are: a range of the file that it is mapped from, else RAM.
/// `wanted` is the dtype on the device (masters that do not float keep theirs). `keep`: whether the
/// file's bytes may stay in the page cache. The bytes are held through `memory`.
SourcePtr source_of(const at::Tensor& master, at::ScalarType wanted, const std::string& name,
                    const Mappings& mappings, Keep keep, MasterMemory& memory);

/// Where the bytes of a coded master are (Note [A coded master]): `coded` has all of the `weights` of the
/// tensor in which its own begin with the `first`. Throws SourceError if they are damaged.
SourcePtr coded_source_of(const at::Tensor& master, const at::Tensor& coded, std::uint64_t first,
                          std::uint64_t weights, at::ScalarType wanted, const std::string& name,
                          const Mappings& mappings, Keep keep, MasterMemory& memory);

/// Where files are mapped, for masters that may lie in one: memory of torch's own allocator never does, and
/// to ask the kernel takes a millisecond. It is asked once at most.
class MappingsOfMasters {
 public:
  const Mappings& of(const at::Tensor& master);

 private:
  const Mappings none_;
  std::optional<Mappings> all_;
};

/// Whether the master's elements are anywhere. False on `meta`, and if its storage was resized to less than
/// it needs.
bool has_memory(const at::Tensor& master);

/// In which dtype a floating master is handed out, if the session has one.
enum class Casting : std::uint8_t {
  to_dtype,         ///< in that
  kept_in_float32,  ///< in float32, or wider if it is; see the note of that name in _swap/kept_in_float32.py
  never_narrowed,   ///< in that, or in its own if that is wider: what has come after the install
  never,            ///< in its own: an inner tensor, a buffer of which a forward has chosen the dtype
};

/// The dtype that a master has on the device.
at::ScalarType wanted_type(const at::Tensor& master, std::optional<at::ScalarType> dtype,
                           Casting casting) noexcept;

}  // namespace dynswap
