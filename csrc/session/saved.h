// What stands in the graph for what autograd saves of weights: see Note [Backward fetches again].
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>

namespace dynswap {

struct Weight;

/// What stands in the graph for a saved tensor.
struct Saved {
  virtual ~Saved() = default;
  virtual at::Tensor unpack() = 0;
};

/// The reference to keep instead of a tensor, or null if the tensor is to be kept itself.
std::unique_ptr<Saved> reference_to(const at::Tensor& tensor);

/// Throws as torch does, if the version of a saved tensor has changed.
/// `like` has its type and device.
void refuse_if_written(std::uint32_t saved, std::uint32_t now, const at::Tensor& like, at::IntArrayRef sizes);

/// The tensor that was saved, as long as somebody else has it. Plain torch gives that one back too, and so
/// autograd does not take its memory for a gradient's.
class SavedOriginal {
 public:
  explicit SavedOriginal(const at::Tensor& saved);
  /// Undefined if it has died, or has other bytes by now than `storage`.
  at::Tensor if_alive() const;

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor_;
  const void* const storage_;
};

/// Keeps the tensor itself.
std::unique_ptr<Saved> kept(const at::Tensor& tensor);

/// What plain torch would have saved: a master, or a view of one.
struct OfMaster {
  at::Tensor tensor;              ///< with the master's bytes and version; undefined: there is no such
  const Weight* whole = nullptr;  ///< the weight (or a part of it), if it is all of its master
};

/// What plain torch would have saved in place of `tensor`, if that shows a weight as its master has it,
/// wherever its bytes are; else nothing.
OfMaster of_master(const at::Tensor& tensor);

}  // namespace dynswap
