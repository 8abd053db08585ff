// One copy on an accelerator's copy stream, by torch's copy_().
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>

#include "accelerator/plain_torch.h"
#include "transfer/copy_plan.h"

namespace dynswap {

/// Enqueues copies on the calling thread's current stream. The caller has made the copy stream the current
/// one, for as long as this object lives.
class CopyStream {
 public:
  /// `non_blocking`: the host memory is pinned, and a copy from it is asynchronous. Else each copy is over
  /// when enqueue() returns.
  CopyStream(const c10::Device& device, bool non_blocking) : device_(device), non_blocking_(non_blocking) {}

  /// Throws c10::Error.
  void enqueue(const Landing& landing) const;

 private:
  at::Tensor on_device(std::byte* data, std::uint64_t count, Scalar type) const;
  void copy_bytes(const at::Tensor& to, const std::byte* from) const;
  void copy_cast(const Landing& landing) const;
  void copy_decoded(const Landing& landing) const;

  const PlainTorch plain_;
  const c10::Device device_;
  const bool non_blocking_;
};

}  // namespace dynswap
