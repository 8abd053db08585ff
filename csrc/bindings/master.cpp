#include "bindings/master.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/StorageImpl.h>

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "bindings/glue.h"
#include "bindings/plain_torch.h"
#include "core/check.h"
#include "io/file.h"

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

std::shared_ptr<MemoryWatch> watch_of(const at::Tensor& master) {
  // Also the gaps between the elements, if there are any.
  const std::size_t bytes =
      at::detail::computeStorageNbytes(master.sizes(), master.strides(), master.itemsize());
  return std::make_shared<MemoryWatch>(master.const_data_ptr(), bytes);
}

Mappings mappings_of(const at::Tensor& master) {
  const bool mapped = !has_own_bytes(master) || !Holds::may_hold(master.storage());
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
                    const Mappings& mappings, PageCacheShare& page_cache, Holds& holds) {
  auto source = std::make_shared<Source>();
  source->name = name;
  source->stored = *scalar_of(master.scalar_type());
  const auto target = scalar_of(wanted);
  DYNSWAP_CHECK(target, "no weight can be streamed as " << c10::toString(wanted));
  source->wanted = *target;
  source->count = static_cast<std::uint64_t>(master.numel());
  source->address = static_cast<const std::byte*>(master.const_data_ptr());
  source->owner = holds.hold(master.storage());
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
