// Enqueues copies on the copy stream.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "cuda/cuda_backend.h"
#include "platform/fork_safe.h"
#include "transfer/copy_plan.h"
#include "transfer/staging.h"

namespace dynswap {

/// Thread-safe.
class CopyIssuer {
 public:
  /// `allocate` gives device memory that the copy stream may write.
  CopyIssuer(const CudaOptions& options, cudaStream_t stream, std::function<Memory(std::size_t)> allocate);

  /// Enqueues the request. Returns its reads, null if it has none. The device's context is current. If it
  /// throws, nothing of the request is under way any more.
  std::shared_ptr<Reads> issue(const CopyRequest& request);
  /// Has all that is enqueued from now on come after these events.
  void wait_for(const std::vector<EventPtr>& events);

  /// Waits for reads: StagingRing::wait().
  bool wait(const Reads& reads, std::chrono::milliseconds patience);
  /// Closes the ring: StagingRing::close(). The stream is to be synchronised after it and before this object
  /// goes.
  void close() noexcept;
  /// Gives the scratch block back. The stream is idle, and nothing is issued any more.
  void release_scratch() noexcept;

 private:
  /// Copies that are enqueued together.
  struct Batch {
    std::vector<void*> dsts;
    std::vector<const void*> srcs;
    std::vector<std::size_t> sizes;
    void add(void* dst, const void* src, std::size_t bytes);
    void clear();
  };

  void enqueue(const CopyBatch& planned, StagingRing* ring);
  void enqueue(Batch& batch);
  void enqueue_cast(const Landing& landing);
  void enqueue_host_function(StagingRing& ring, std::uint64_t chunk, bool arrive);
  void settle(StagingRing* ring, const std::shared_ptr<Reads>& reads) noexcept;

  StagingRing* staging();
  void prepare_scratch();

  const CudaOptions& options_;
  const cudaStream_t stream_;
  const std::function<Memory(std::size_t)> allocate_;
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
