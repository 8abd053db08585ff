// A coded master's content, as Python code has it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "core/source.h"
#include "tensor/master_content.h"

namespace dynswap {

/// Where the values of a coded master are: a `HeldContent` of dynswap_ext/_swap/subclasses.py.
struct HeldContent {
  explicit HeldContent(const py::tuple& given)
      : content(given[0]),
        bytes(given[1].cast<at::Tensor>()),
        first(given[2].cast<std::optional<std::uint64_t>>()),
        weights(given[3].cast<std::uint64_t>()) {}

  py::object content;                  ///< `Content` of dynswap_ext/lossless/tensor.py
  at::Tensor bytes;                    ///< plain values, or all coded bytes of the tensor with `weights`
  std::optional<std::uint64_t> first;  ///< of its weights, the master's first; none: the values are plain
  std::uint64_t weights;
};

/// The content of a LosslessTensor (Note [A coded master]). As a MasterContent it runs no Python code: fields
/// of a `Content` are all that it asks for, so no other thread takes the GIL in between.
class PythonContent final : public MasterContent {
 public:
  /// `source`: the master's. Not needed if the values are plain.
  PythonContent(HeldContent held, const at::Tensor& master, const Source* source = nullptr);
  ~PythonContent() override;

  bool was_coded() const override { return held_.first.has_value(); }
  bool became_plain() const override;
  at::Tensor values() const override;
  at::Tensor coded_values() const override;
  at::Tensor memory() override;
  std::shared_ptr<MasterContent> as_plain() override;
  std::shared_ptr<MasterContent> without_bytes() override;
  std::shared_ptr<MasterContent> with_bytes() override;
  Sharing::Place place() override;

  /// A view of the master, as a LosslessTensor of the same content. Runs Python code.
  at::Tensor view(at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t offset) const;

 private:
  PythonContent(HeldContent held, const PythonContent& of);
  py::object field(const char* name) const { return held_.content.attr(name); }
  bool keeps_bytes() const { return held_.bytes.defined(); }
  at::Tensor decoded(std::uint64_t first, std::uint64_t count) const;
  at::Tensor shown(const at::Tensor& whole, std::int64_t offset) const;

  HeldContent held_;       ///< LOCK: the GIL. Without bytes, its content is a weak reference
  const SourcePtr coded_;  ///< all of the tensor's weights, from memory; null: they are plain
  const at::ScalarType type_;
  const c10::DimVector sizes_, strides_;
  const std::int64_t offset_;  ///< of the master in what has plain values
};

}  // namespace dynswap
