// Enqueues copies on torch's copy stream.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "core/backend.h"
#include "platform/fork_safe.h"
#include "transfer/copy_plan.h"
#include "transfer/staging.h"
#include "transfer/stream_backend.h"

namespace dynswap {

class TorchCopyIssuer final : public CopyIssuer {
 public:
  TorchCopyIssuer(const c10::Device& device, std::shared_ptr<TransferStream> stream);
  ~TorchCopyIssuer() override;
  TorchCopyIssuer(const TorchCopyIssuer&) = delete;
  TorchCopyIssuer& operator=(const TorchCopyIssuer&) = delete;

  void issue(const CopyRequest& request, const StreamEventPtr& copied) override;
  void wait(const Reads& reads) override;
  void close() noexcept override;

 private:
  struct Deferred;

  Deferred& deferred();
  DeviceAbilities abilities_for(const CopyRequest& request);
  void issue_later(const CopyRequest& request, const StreamEventPtr& copied, DeviceAbilities device);
  void enqueue(std::vector<CopyBatch>& batches, StreamEvent& copied, Deferred* staged);
  void make_room(Deferred& staged, std::uint64_t chunk);
  void give_up(std::vector<CopyBatch>& batches, StreamEvent& copied, std::exception_ptr error,
               Deferred* staged) noexcept;

  const c10::Device device_;
  const std::shared_ptr<TransferStream> stream_;
  const bool pinned_;  ///< the device has pinned memory

  /// Taken first; held while chunks are added and their copies queued, which is to be in one order. No call
  /// of torch's is made under it.
  Mutex queueing_;

  std::optional<bool> decodes_;  ///< LOCK: setup_; whether the device can; none: it has not been asked

  Mutex setup_;
  std::unique_ptr<Deferred> deferred_;  ///< LOCK: setup_; does not change once it is set, until the end
};

}  // namespace dynswap
