// Tensors on the device as the model's code sees them, and what becomes of what is written on them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "bindings/master.h"
#include "core/engine.h"

namespace dynswap {

/// What a handed-out tensor's storage owns: its lease (or its own memory), and the way back to the
/// master. Dies with the storage, on whichever thread lets go last.
class HandedOut {
 public:
  /// A tensor over the leased bytes, shaped and strided as `master`, of type `wanted` on `device`.
  static at::Tensor make(Lease lease, const at::Tensor& master, at::ScalarType wanted,
                         const at::Device& device);
  /// A converted copy with memory of its own.
  static at::Tensor make_private(const at::Tensor& master, at::ScalarType wanted, const at::Device& device);
  /// The record of a tensor made here, or null if its storage is another one by now.
  static HandedOut* of(const c10::TensorImpl& tensor) noexcept;

  ~HandedOut();
  HandedOut(const HandedOut&) = delete;
  HandedOut& operator=(const HandedOut&) = delete;

  void use_on(Stream consumer);

  /// From now on its bytes tell whether it was written, not its version: F.batch_norm writes its running
  /// statistics and bumps nothing.
  void compare_bytes() noexcept { compare_bytes_ = true; }

  /// Takes to the master what was written in place. Does nothing if nothing was, or if the master has
  /// been written itself since (masters are the truth). Returns the master as it is after a write.
  std::optional<MasterState> write_back();

 private:
  HandedOut(const at::Tensor& master, at::ScalarType wanted, const at::Device& device);
  static at::Tensor finish(std::unique_ptr<HandedOut> record, const at::Tensor& master);
  bool written() const;
  at::Tensor view() const;

  Lease lease_;
  at::Tensor own_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  at::TensorOptions options_;
  c10::weak_intrusive_ptr<c10::TensorImpl> master_;
  MasterState master_state_;
  bool compare_bytes_ = false;
  c10::VariableVersion version_;  ///< shared with the tensor and its views
  std::uint32_t seen_version_ = 0;
  std::uint64_t seen_fingerprint_ = 0;
};

}  // namespace dynswap
