// Enqueues copies by CUDA's calls.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "cuda/cuda_device.h"
#include "platform/fork_safe.h"
#include "transfer/copy_plan.h"
#include "transfer/staging.h"
#include "transfer/stream_backend.h"

namespace dynswap {

class CudaCopyIssuer final : public CopyIssuer {
 public:
  /// Within an OnDevice.
  CudaCopyIssuer(int device, std::function<void(const std::string&)> warn,
                 std::shared_ptr<TransferStream> stream);

  void issue(const CopyRequest& request, const StreamEventPtr& copied) override;
  void wait(const Reads& reads) override;
  void close() noexcept override;
  /// Gives the scratch block back.
  void release_memory() noexcept override;

 private:
  /// Copies that are enqueued together.
  struct Batch {
    std::vector<void*> dsts;
    std::vector<const void*> srcs;
    std::vector<std::size_t> sizes;
    void add(void* dst, const void* src, std::size_t bytes);
    void clear();
  };

  cudaStream_t handle() const noexcept { return cuda_stream(stream_->handle()); }
  std::shared_ptr<Reads> enqueue(const CopyRequest& request);
  void enqueue(const CopyBatch& planned, StagingRing* ring);
  void enqueue(Batch& batch);
  void enqueue_cast(const Landing& landing);
  void enqueue_decode(const Landing& landing);
  void enqueue_host_function(StagingRing& ring, std::uint64_t chunk, bool arrive);
  void settle(StagingRing* ring, const std::shared_ptr<Reads>& reads) noexcept;

  StagingRing* staging();
  void prepare_scratch();

  const int device_;
  const std::function<void(const std::string&)> warn_;
  const std::shared_ptr<TransferStream> stream_;
  const cudaError_t no_kernels_;     ///< why none runs on this device; cudaSuccess: they do
  std::atomic<bool> warned_{false};  ///< that there is none
  std::atomic<bool> batches_{true};  ///< the driver knows batched copies

  Mutex setup_;
  std::unique_ptr<StagingRing> ring_;  ///< LOCK: setup_; does not change once it is set
  Memory scratch_;                     ///< LOCK: setup_; does not change once it is set, until the end
  std::size_t scratch_bytes_ = 0;      ///< LOCK: setup_; the same

  /// Note [One issuer at a time]: a request that is staged or cast enqueues several things that nothing
  /// of another request may come between: the chunks' order is the stream's order (Note [A staged copy]),
  /// and the scratch block belongs to one cast from its copy to its kernel. So there is one mutex under
  /// which CUDA calls are made. It cannot be part of a deadlock: it is taken first and by issuers alone
  /// (no host function, reader, event or destructor takes it), and no allocation of device memory is made
  /// under it. Requests of pinned sources that are not cast, the steady state, do not take it.
  Mutex issuing_;
};

}  // namespace dynswap
