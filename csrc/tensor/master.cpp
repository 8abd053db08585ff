#include "tensor/master.h"

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
#include "accelerator/scalars.h"
#include "core/check.h"
#include "io/file.h"
#include "io/reader.h"
#include "lossless/tensor.h"
#include "platform/fork_safe.h"
#include "platform/mapped_memory.h"

namespace dynswap {

namespace {

/// Opens one File for each mapping that a master lies in, and keeps it for as long as it is used. It is not
/// one for each file: a file that was rewritten in place and is mapped again has other bytes.
std::shared_ptr<const File> open_once(const Mappings::Range& range) {
  struct OpenFiles {
    Mutex mutex;
    std::map<std::tuple<std::string, std::uint64_t, std::uintptr_t>, std::weak_ptr<const File>>
        all;  ///< LOCK: mutex
  };
  static PerProcess<OpenFiles> open;
  OpenFiles& files = *open;
  const std::lock_guard lock(files.mutex);
  std::weak_ptr<const File>& known = files.all[{range.path, range.inode, range.mapped_at}];
  std::shared_ptr<const File> file = known.lock();
  if (!file) {
    file = File::open(range.path);
    known = file;
  }
  return file;
}

/// Has a source's bytes read from a range of a file.
void read_from_file(Source& source, const Mappings::Range& range, Keep keep) {
  const auto file = open_once(range);
  // Under another inode the path names another file by now; what is mapped can still be read in RAM.
  if (file->inode() != range.inode) return;
  source.file = file;
  source.of_file = true;
  source.offset = range.offset;
  source.keep = keep;
}

/// The parts of a source whose memory is several mappings: see Note [A source of several parts]. Nothing if
/// none of them can be read from a file, or if an element lies across two of them.
std::vector<SourcePtr> parts_of(const SourcePtr& source, const Mappings& mappings, Keep keep) {
  std::vector<SourcePtr> parts;
  const std::size_t element = scalar_size(source->stored);
  std::uint64_t before = 0;
  for (const Mappings::Part& found : mappings.parts_of(source->address, source->stored_bytes())) {
    if (found.bytes % element != 0) return {};
    const std::shared_ptr<Source> part = slice(source, before, found.bytes / element);
    part->mapped = found.mapped;
    if (found.range) read_from_file(*part, *found.range, keep);
    before += part->count;
    parts.push_back(part);
  }
  const bool any =
      std::any_of(parts.begin(), parts.end(), [](const SourcePtr& part) { return part->of_file; });
  return any ? parts : std::vector<SourcePtr>();
}

}  // namespace

bool copyable(const at::Tensor& master) {
  return has_own_bytes(master) && master.is_cpu() &&
         !master.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !master.is_quantized() &&
         master.numel() > 0 && at::has_internal_overlap(master) != at::MemOverlap::Yes &&
         scalar_of(master.scalar_type()).has_value();
}

bool lies_as_copy(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.key_set().has_any(kLazyViews);
}

bool streamable(const at::Tensor& master) { return copyable(master) && lies_as_copy(master); }

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
         mappings.holds_any(master.const_data_ptr(), master.nbytes());
}

at::Tensor read_master(const at::Tensor& master, const std::string& who) {
  const Elements elements = elements_of(master);
  const at::Tensor bytes = at::empty({static_cast<std::int64_t>(elements.bytes)}, at::kByte);
  if (!read_mapped(elements.address, bytes.mutable_data_ptr(), elements.bytes))
    throw SourceError(gone(who, elements.address));
  const at::Tensor copy = at::from_blob(
      bytes.mutable_data_ptr(), master.sizes(), master.strides(), [bytes](void*) {},
      at::TensorOptions().dtype(master.dtype()));
  if (master.is_conj()) copy._set_conj(true);
  if (master.is_neg()) copy._set_neg(true);
  return copy;
}

void write_master(const at::Tensor& master, const at::Tensor& copy, const std::string& who) {
  const void* const address = master.const_data_ptr();
  if (!write_mapped(const_cast<void*>(address), copy.const_data_ptr(), master.nbytes()))
    throw SourceError(gone(who, address));
}

const Mappings& MappingsOfMasters::of(const at::Tensor& master) {
  if (has_own_bytes(master) && MasterMemory::can_hold(master.storage())) return none_;
  if (!all_) all_ = Mappings::of_this_process();
  return *all_;
}

bool has_memory(const at::Tensor& master) {
  if (master.is_meta()) return false;
  if (!has_own_bytes(master) || master.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return true;
  const std::size_t needed = at::detail::computeStorageNbytes(master.sizes(), master.strides(),
                                                              master.itemsize(), master.storage_offset());
  return master.storage().nbytes() >= needed;
}

at::ScalarType wanted_type(const at::Tensor& master, std::optional<at::ScalarType> dtype,
                           Casting casting) noexcept {
  const at::ScalarType own = master.scalar_type();
  if (!dtype || casting == Casting::never || !at::isFloatingType(own)) return own;
  if (casting == Casting::to_dtype) return *dtype;
  const at::ScalarType least = casting == Casting::kept_in_float32 ? at::kFloat : *dtype;
  return at::elementSize(own) > at::elementSize(least) ? own : least;
}

SourcePtr source_of(const at::Tensor& master, at::ScalarType wanted, const std::string& name,
                    const Mappings& mappings, Keep keep, MasterMemory& memory) {
  auto source = std::make_shared<Source>();
  source->name = name;
  source->stored = *scalar_of(master.scalar_type());
  const auto target = scalar_of(wanted);
  DYNSWAP_CHECK(target, "no weight can be streamed as " << c10::toString(wanted));
  source->wanted = *target;
  source->count = static_cast<std::uint64_t>(master.numel());
  source->address = static_cast<const std::byte*>(master.const_data_ptr());
  source->allocated = MasterMemory::can_hold(master.storage());
  source->owner = memory.hold(master.storage());
  source->mapped = mappings.holds_any(source->address, source->stored_bytes());
  if (!source->mapped) return source;
  if (const auto range = mappings.find(source->address, source->stored_bytes())) {
    read_from_file(*source, *range, keep);
  } else {
    source->parts = parts_of(source, mappings, keep);
    source->of_file = !source->parts.empty();
    source->offset = reinterpret_cast<std::uintptr_t>(source->address);  // mapped: congruent modulo a page
  }
  return source;
}

namespace {

/// The index of a coded tensor, read once for all that are parts of it.
std::shared_ptr<const Coding> coding_of(const Source& coded, Scalar stored, std::uint64_t weights) {
  struct Known {
    Mutex mutex;
    std::map<std::pair<const std::byte*, const void*>, std::weak_ptr<const Coding>> all;  ///< LOCK: mutex
  };
  static PerProcess<Known> known;
  const std::lock_guard lock(known->mutex);
  std::weak_ptr<const Coding>& earlier = known->all[{coded.address, coded.owner.get()}];
  if (auto coding = earlier.lock(); coding && coding->weights == weights) return coding;
  const auto damaged = [&](const std::string& why) {
    return SourceError("weight '" + coded.name + "' cannot be read: its coded bytes are damaged (" + why +
                       "); get a complete copy of the file" +
                       (coded.file ? " '" + coded.file->path() + "'" : std::string()));
  };
  const std::size_t bytes = lossless::index_bytes(weights);
  if (bytes > coded.count) throw damaged("they end within the index");
  auto made = std::make_shared<Coding>();
  made->block_weights = lossless::kBlockWeights;
  made->weights = weights;
  made->blocks.resize(bytes / sizeof(std::uint64_t));
  fetch_from_memory(coded, 0, reinterpret_cast<std::byte*>(made->blocks.data()), bytes);
  const std::string wrong = lossless::check_index(
      stored, reinterpret_cast<const std::byte*>(made->blocks.data()), coded.count, weights);
  if (!wrong.empty()) throw damaged(wrong);
  made->blocks.resize(lossless::blocks_of(weights) + 1);
  earlier = made;
  std::erase_if(known->all, [](const auto& entry) { return entry.second.expired(); });
  return made;
}

}  // namespace

SourcePtr coded_source_of(const at::Tensor& master, const at::Tensor& coded, std::uint64_t first,
                          std::uint64_t weights, at::ScalarType wanted, const std::string& name,
                          const Mappings& mappings, Keep keep, MasterMemory& memory) {
  auto source = std::make_shared<Source>(*source_of(coded, at::kByte, name, mappings, keep, memory));
  source->parts.clear();  // of several mappings: it is read from these
  if (!source->file) source->of_file = false;
  const auto stored = scalar_of(master.scalar_type()), target = scalar_of(wanted);
  DYNSWAP_CHECK(stored && target && lossless::codable(*stored),
                "no weight is coded as " << c10::toString(master.scalar_type()));
  const auto count = static_cast<std::uint64_t>(master.numel());
  DYNSWAP_CHECK(first + count <= weights, "a coded master's weights are some of its tensor's");
  source->coding = coding_of(*source, *stored, weights);
  source->stored = *stored;
  source->wanted = *target;
  source->coded_first = first;
  source->count = count;
  return source;
}

}  // namespace dynswap
