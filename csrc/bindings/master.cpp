#include "bindings/master.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "accelerator/plain_torch.h"
#include "bindings/glue.h"
#include "core/check.h"
#include "io/file.h"
#include "io/reader.h"
#include "platform/mapped_memory.h"

namespace dynswap {

namespace {

/// Opens one File for each mapping that a master lies in, and keeps it for as long as it is used. It is not
/// one for each file: a file that was rewritten in place and is mapped again has other bytes.
std::shared_ptr<const File> open_once(const Mappings::Range& range) {
  static std::mutex mutex;
  static std::map<std::tuple<std::string, std::uint64_t, std::uintptr_t>, std::weak_ptr<const File>>
      open_files;
  const std::lock_guard lock(mutex);
  std::weak_ptr<const File>& known = open_files[{range.path, range.inode, range.mapped_at}];
  std::shared_ptr<const File> file = known.lock();
  if (!file) {
    file = File::open(range.path);
    known = file;
  }
  return file;
}

}  // namespace

bool copyable(const at::Tensor& master) noexcept {
  return has_own_bytes(master) && master.is_cpu() &&
         !master.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !master.is_quantized() &&
         !master.is_neg() && !master.is_conj() && master.numel() > 0 &&
         at::has_internal_overlap(master) != at::MemOverlap::Yes &&
         scalar_of(master.scalar_type()).has_value();
}

bool streamable(const at::Tensor& master) noexcept {
  return copyable(master) && master.is_non_overlapping_and_dense();
}

c10::DimVector strides_of_copy(const at::Tensor& master) {
  if (master.is_non_overlapping_and_dense()) return c10::DimVector(master.strides());
  const std::vector<std::int64_t> dense = at::infer_dense_strides(master.sizes(), master.strides());
  return c10::DimVector(dense.begin(), dense.end());
}

Elements elements_of(const at::Tensor& master) {
  Elements elements{static_cast<const std::byte*>(master.const_data_ptr()),
                    at::detail::computeStorageNbytes(master.sizes(), master.strides(), master.itemsize()),
                    master.itemsize()};
  std::vector<Elements::Repeat>& repeats = elements.repeats;
  for (std::int64_t i = 0; i < master.dim(); ++i) {
    if (master.size(i) > 1)
      repeats.push_back({static_cast<std::size_t>(master.size(i)),
                         static_cast<std::size_t>(master.stride(i)) * master.itemsize()});
  }
  std::sort(repeats.begin(), repeats.end(), [](const auto& a, const auto& b) { return a.stride > b.stride; });
  for (; !repeats.empty() && repeats.back().stride == elements.run; repeats.pop_back())
    elements.run *= repeats.back().count;
  return elements;
}

std::shared_ptr<MemoryWatch> watch_of(const at::Tensor& master, bool mapped) {
  return std::make_shared<MemoryWatch>(elements_of(master), mapped);
}

bool is_mapped(const at::Tensor& master, const Mappings& mappings) {
  return has_own_bytes(master) && master.is_cpu() && has_memory(master) &&
         mappings.file_at(master.const_data_ptr()) != nullptr;
}

at::Tensor read_master(const at::Tensor& master, const std::string& who) {
  const Elements elements = elements_of(master);
  const at::Tensor bytes = at::empty({static_cast<std::int64_t>(elements.bytes)}, at::kByte);
  if (!read_mapped(elements.address, bytes.mutable_data_ptr(), elements.bytes))
    throw SourceError(gone(who, elements.address));
  return at::from_blob(
      bytes.mutable_data_ptr(), master.sizes(), master.strides(), [bytes](void*) {},
      at::TensorOptions().dtype(master.dtype()));
}

void write_master(const at::Tensor& master, const at::Tensor& copy, const std::string& who) {
  const void* const address = master.const_data_ptr();
  if (!write_mapped(const_cast<void*>(address), copy.const_data_ptr(), master.nbytes()))
    throw SourceError(gone(who, address));
}

Mappings mappings_of(const at::Tensor& master) {
  const bool mapped = !has_own_bytes(master) || !MasterMemory::can_hold(master.storage());
  return mapped ? Mappings::of_this_process() : Mappings();
}

bool has_memory(const at::Tensor& master) noexcept {
  if (master.is_meta()) return false;
  if (!has_own_bytes(master) || master.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return true;
  const std::size_t needed = at::detail::computeStorageNbytes(master.sizes(), master.strides(),
                                                              master.itemsize(), master.storage_offset());
  return master.storage().nbytes() >= needed;
}

at::ScalarType wanted_type(const at::Tensor& master, std::optional<at::ScalarType> dtype) noexcept {
  return dtype && at::isFloatingType(master.scalar_type()) ? *dtype : master.scalar_type();
}

SourcePtr source_of(const at::Tensor& master, at::ScalarType wanted, const std::string& name,
                    const Mappings& mappings, PageCacheShare& page_cache, MasterMemory& memory) {
  auto source = std::make_shared<Source>();
  source->name = name;
  source->stored = *scalar_of(master.scalar_type());
  const auto target = scalar_of(wanted);
  DYNSWAP_CHECK(target, "no weight can be streamed as " << c10::toString(wanted));
  source->wanted = *target;
  source->count = static_cast<std::uint64_t>(master.numel());
  source->address = static_cast<const std::byte*>(master.const_data_ptr());
  source->owner = memory.hold(master.storage());
  source->mapped = mappings.file_at(source->address) != nullptr;
  if (const auto range = mappings.find(source->address, source->stored_bytes())) {
    const auto file = open_once(*range);
    // Under another inode the path names another file by now; what is mapped can still be read in RAM.
    if (file->inode() == range->inode) {
      source->file = file;
      source->of_file = true;
      source->offset = range->offset;
      const std::uint64_t bytes = source->stored_bytes();
      source->keep = bytes <= page_cache.bytes ? page_cache.keep : Keep::no;
      if (source->keep != Keep::no) page_cache.bytes -= bytes;
    }
  }
  return source;
}

}  // namespace dynswap
