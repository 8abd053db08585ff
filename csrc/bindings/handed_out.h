// Tensors on the device as the model's code sees them, and what becomes of what is written on them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "bindings/master.h"
#include "core/engine.h"

namespace dynswap {

class Session;
struct Weight;

/// What a handed-out tensor's storage owns: its lease (or its own memory), and the way back to the
/// master. Dies with the storage, on whichever thread lets go last.
class HandedOut {
 public:
  /// Whose bytes they are. The session keeps the weight.
  struct Origin {
    std::weak_ptr<Session> session;
    Weight* weight = nullptr;
  };

  /// A tensor over the leased bytes, shaped and strided as `master`, of the weight's type on `device`.
  static at::Tensor make(Lease lease, const Origin& origin, const at::Tensor& master,
                         const at::Device& device);
  /// A converted copy with memory of its own.
  static at::Tensor make_private(const Origin& origin, const at::Tensor& master, const at::Device& device);
  /// The record of a tensor made here, or null if its storage is another one by now.
  static HandedOut* of(const c10::TensorImpl& tensor) noexcept;
  static HandedOut* of(const c10::StorageImpl& storage) noexcept;

  ~HandedOut();
  HandedOut(const HandedOut&) = delete;
  HandedOut& operator=(const HandedOut&) = delete;

  void use_on(Stream consumer);

  const Origin& origin() const noexcept { return origin_; }
  at::ScalarType dtype() const noexcept { return options_.dtype().toScalarType(); }
  bool leased() const noexcept { return static_cast<bool>(lease_); }
  /// The master's bytes and version counter; not the master itself, which nothing here keeps.
  const at::Tensor& master() const noexcept { return master_; }
  /// Whether the master is still what was handed out, as far as can be told.
  bool master_unchanged() const;

  /// From now on its bytes tell whether it was written, not its version: F.batch_norm writes its running
  /// statistics and bumps nothing.
  void compare_bytes() noexcept { compare_bytes_ = true; }

  /// Takes to the master what was written in place. Does nothing if nothing was, or if the master has
  /// been written itself since (masters are the truth). Returns the master's version after a write.
  std::optional<std::uint32_t> write_back();

 private:
  HandedOut(const Origin& origin, const at::Tensor& master, const at::Device& device);
  static at::Tensor finish(std::unique_ptr<HandedOut> record, const at::Tensor& master);
  bool written() const;
  at::Tensor view() const;

  Lease lease_;
  Origin origin_;
  at::Tensor own_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  at::TensorOptions options_;
  at::Tensor master_;
  std::uint32_t master_version_ = 0;
  SourcePtr source_;
  SilentWrites master_written_;
  std::optional<std::uint64_t> master_fingerprint_;  ///< of a private copy's master
  bool compare_bytes_ = false;
  c10::VariableVersion version_;  ///< shared with the tensor and its views
  std::uint32_t seen_version_ = 0;
  std::uint64_t seen_fingerprint_ = 0;
};

}  // namespace dynswap
