#include "session/python_content.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "accelerator/plain_torch.h"
#include "io/reader.h"
#include "tensor/master.h"

namespace dynswap {

namespace {

/// The tensor that a source is a part of, as a source in memory: its file may be closed earlier.
SourcePtr whole_in_memory(const HeldContent& held, const Source& part) {
  auto whole = std::make_shared<Source>();
  whole->name = part.name;
  whole->stored = whole->wanted = part.stored;
  whole->count = held.weights;
  whole->address = static_cast<const std::byte*>(held.bytes.const_data_ptr());
  whole->mapped = part.mapped || part.from_files();
  whole->coding = part.coding;
  return whole;
}

}  // namespace

PythonContent::PythonContent(HeldContent held, const at::Tensor& master, const Source* source)
    : held_(std::move(held)),
      coded_(held_.first ? whole_in_memory(held_, *source) : nullptr),
      type_(master.scalar_type()),
      sizes_(master.sizes()),
      strides_(master.strides()),
      offset_(master.storage_offset()) {}

PythonContent::PythonContent(HeldContent held, const PythonContent& of)
    : held_(std::move(held)),
      coded_(held_.first ? of.coded_ : nullptr),
      type_(of.type_),
      sizes_(of.sizes_),
      strides_(of.strides_),
      offset_(of.offset_) {}

PythonContent::~PythonContent() {
  if (Py_IsInitialized() == 0) {
    (void)held_.content.release();
    return;
  }
  const py::gil_scoped_acquire gil;
  held_.content = py::object();
}

bool PythonContent::became_plain() const {
  const py::gil_scoped_acquire gil;
  if (!was_coded()) return false;
  if (keeps_bytes()) return field("coded").is_none();
  const py::object alive = held_.content();
  return !alive.is_none() && alive.attr("coded").is_none();
}

at::Tensor PythonContent::values() const {
  const py::gil_scoped_acquire gil;
  const PlainTorch guard;
  if (field("coded").is_none()) return shown(field("plain").cast<at::Tensor>(), offset_);
  return coded_values();
}

at::Tensor PythonContent::coded_values() const {
  const PlainTorch guard;
  return shown(decoded(*held_.first, static_cast<std::uint64_t>(c10::multiply_integers(sizes_))), 0);
}

/// As `make_plain()` of a `Content` does. Of two threads that do it at once, the second finds it done.
at::Tensor PythonContent::memory() {
  const py::gil_scoped_acquire gil;
  const PlainTorch guard;
  if (!field("coded").is_none()) {
    const c10::InferenceMode ordinary(false);
    const py::object plain = py::cast(decoded(0, held_.weights));
    const py::object coded = field("coded");  // goes once the content is plain
    held_.content.attr("plain") = plain;
    held_.content.attr("coded") = py::none();
    held_.content.attr("_shown") = py::none();
  }
  return shown(field("plain").cast<at::Tensor>(), offset_);
}

std::shared_ptr<MasterContent> PythonContent::as_plain() {
  const py::gil_scoped_acquire gil;
  HeldContent plain = held_;
  plain.bytes = memory();
  plain.first.reset();
  return std::shared_ptr<MasterContent>(new PythonContent(std::move(plain), *this));
}

std::shared_ptr<MasterContent> PythonContent::without_bytes() {
  const py::gil_scoped_acquire gil;
  if (!keeps_bytes()) return shared_from_this();
  HeldContent weak = held_;
  weak.content = py::weakref(held_.content);
  weak.bytes = at::Tensor();
  return std::shared_ptr<MasterContent>(new PythonContent(std::move(weak), *this));
}

std::shared_ptr<MasterContent> PythonContent::with_bytes() {
  if (keeps_bytes()) return shared_from_this();
  const py::gil_scoped_acquire gil;
  HeldContent held = held_;
  held.content = held_.content();
  const py::object coded = held.content.attr("coded");
  if (coded.is_none()) held.first.reset();
  held.bytes = (coded.is_none() ? held.content.attr("plain") : coded).cast<at::Tensor>();
  return std::shared_ptr<MasterContent>(new PythonContent(std::move(held), *this));
}

Sharing::Place PythonContent::place() {
  const py::gil_scoped_acquire gil;
  if (!held_.first && field("place").is_none()) return Sharing::Place::of(held_.bytes);
  static std::uintptr_t next = ~(~std::uintptr_t{0} >> 1);  // programs have the lower half of all addresses
  const std::size_t size = c10::elementSize(type_), bytes = held_.weights * size;
  if (field("place").is_none()) {
    held_.content.attr("place") = next;
    next += bytes;
  }
  const auto* const begin = reinterpret_cast<const std::byte*>(field("place").cast<std::uintptr_t>());
  Elements elements =
      held_.first ? dense_elements(begin, size * static_cast<std::size_t>(c10::multiply_integers(sizes_)))
                  : elements_of(held_.bytes);
  elements.address = begin + static_cast<std::size_t>(offset_) * size;
  return {std::move(elements), begin, begin + bytes};
}

at::Tensor PythonContent::view(at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t offset) const {
  return field("wrapped")(type_, sizes, strides, offset_ + offset).cast<at::Tensor>();
}

at::Tensor PythonContent::decoded(std::uint64_t first, std::uint64_t count) const {
  const at::Tensor values = at::empty({static_cast<std::int64_t>(count)}, type_);
  read_piece({coded_, first, count, nullptr}, static_cast<std::byte*>(values.mutable_data_ptr()),
             /*cast=*/nullptr, ReadMode::quick);
  return values;
}

at::Tensor PythonContent::shown(const at::Tensor& whole, std::int64_t offset) const {
  return (whole.scalar_type() == type_ ? whole : whole.view(type_)).as_strided(sizes_, strides_, offset);
}

}  // namespace dynswap
