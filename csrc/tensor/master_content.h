// Masters whose values are not the bytes of their own memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tensor/sharing.h"

namespace dynswap {

/// Note [A coded master]
/// A LosslessTensor (dynswap_ext/lossless/tensor.py) has coded bytes, from which the engine's copies are
/// decoded, until somebody writes to it. From then on it has plain values in memory. So a handed-out tensor
/// asks its master's content for the values to compare with, and for the memory to write to. No watch tells
/// of writes to that memory until the session looks at the master again. So if a handed-out tensor is of
/// coded bytes, and its master is plain by now, the master counts as written, and what was coded is compared.
///
/// Any thread may ask, with the GIL or without.
class MasterContent : public std::enable_shared_from_this<MasterContent> {
 public:
  virtual ~MasterContent() = default;

  /// Whether it was coded in the beginning.
  virtual bool was_coded() const = 0;
  /// Whether it was coded, and is plain by now.
  virtual bool became_plain() const = 0;
  /// The values, shaped and strided as the master, in ordinary memory: a copy, if it is coded.
  virtual at::Tensor values() const = 0;
  /// If it was coded: what the coded bytes stand for, as values(), also when it has others by now.
  virtual at::Tensor coded_values() const = 0;
  /// The memory of its values. Decodes them for good.
  virtual at::Tensor memory() = 0;
  /// Decodes for good, and returns the content of a master that was plain in the beginning.
  virtual std::shared_ptr<MasterContent> as_plain() = 0;
  /// A reference to the content that does not keep its bytes, and cannot be asked for any.
  virtual std::shared_ptr<MasterContent> without_bytes() = 0;
  /// A reference to the content that keeps its bytes. To be called while the master is alive.
  virtual std::shared_ptr<MasterContent> with_bytes() = 0;
  /// Where its values are, or would be if it were plain. Masters that share a content have places in one.
  virtual Sharing::Place place() = 0;
};

}  // namespace dynswap
