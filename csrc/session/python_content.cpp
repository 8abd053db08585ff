#include "session/python_content.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "accelerator/plain_torch.h"
#include "io/reader.h"

namespace dynswap {

namespace {

/// The tensor that a source is a part of, as a source in memory. (Its file may be closed before this goes.)
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

PythonContent::PythonContent(HeldContent held, const at::Tensor& master, const Source& source)
    : held_(std::move(held)),
      coded_(whole_in_memory(held_, source)),
      type_(master.scalar_type()),
      sizes_(master.sizes()),
      strides_(master.strides()),
      offset_(master.storage_offset()) {}

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
  return was_coded() && field("coded").is_none();
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
  }
  return shown(field("plain").cast<at::Tensor>(), offset_);
}

at::Tensor PythonContent::decoded(std::uint64_t first, std::uint64_t count) const {
  const at::Tensor values = at::empty({static_cast<std::int64_t>(count)}, type_);
  read_piece({coded_, first, count, nullptr}, static_cast<std::byte*>(values.mutable_data_ptr()),
             /*cast=*/nullptr, ReadMode::quick);
  return values;
}

at::Tensor PythonContent::shown(const at::Tensor& whole, std::int64_t offset) const {
  return whole.as_strided(sizes_, strides_, offset);
}

}  // namespace dynswap
