#include "cuda/copy_issuer.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "core/check.h"
#include "cuda/cast_kernels.h"
#include "cuda/cuda_check.h"
#include "cuda/events.h"

namespace dynswap {
namespace {

constexpr std::size_t kScratchBytes = 16u << 20;
constexpr std::size_t kLeastScratchBytes = 1u << 18;

/// cudaSuccess, or why no kernel of this build runs on the current device: none was compiled for it, and the
/// driver cannot compile one. (It takes no PTX of a toolkit that is newer.) Throws for any other reason why a
/// kernel could not be launched.
cudaError_t why_no_kernels() {
  const cudaError_t error = kernels_for_this_device();
  switch (error) {
    case cudaSuccess:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidPtx:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilationDisabled:
      (void)cudaGetLastError();
      return error;
    default:
      throw_cuda_error(error, "cudaFuncGetAttributes", "the cast kernels");
  }
}

/// What to add to the error of a copy whose addresses were valid when it was planned.
const char* advice(cudaError_t error) noexcept {
  return error == cudaErrorInvalidValue ? ". If other code has page-locked or unlocked weights since the "
                                          "install, install the model again"
                                        : "";
}

bool lacks_kernel(const CopyRequest& request) noexcept {
  for (const Step& step : request.steps) {
    for (const Piece& piece : step.pieces) {
      if (piece.source->cast()) return true;
    }
  }
  return false;
}

/// What the stream tells the ring.
struct Progress {
  StagingRing& ring;
  std::uint64_t chunk;
  bool arrive;
};

void CUDART_CB tell(void* data) {
  const std::unique_ptr<Progress> progress(static_cast<Progress*>(data));
  if (progress->arrive) {
    progress->ring.arrive(progress->chunk);
  } else {
    progress->ring.passed(progress->chunk);
  }
}

}  // namespace

CopyIssuer::CopyIssuer(const CudaOptions& options, cudaStream_t stream,
                       std::function<Memory(std::size_t)> allocate)
    : options_(options), stream_(stream), allocate_(std::move(allocate)), no_kernels_(why_no_kernels()) {}

std::shared_ptr<Reads> CopyIssuer::issue(const CopyRequest& request) {
  const bool kernels = no_kernels_ == cudaSuccess;
  const CopyNeeds needs = needs_of(request, kernels);
  if (!kernels && lacks_kernel(request) && options_.warn && !warned_.exchange(true)) {
    options_.warn("this build has no kernels that CUDA device " + std::to_string(options_.device) +
                  " can run (" + cudaGetErrorName(no_kernels_) +
                  "): weights are cast on the host, which is slower. Rebuild with "
                  "TORCH_CUDA_ARCH_LIST set to the device's capability, such as 8.6; "
                  "torch.cuda.get_device_capability() tells it");
  }
  if (needs.casting) prepare_scratch();
  if (!needs.staging && !needs.casting) {
    for (const CopyBatch& batch : plan_copies(request, kernels, nullptr, nullptr)) enqueue(batch, nullptr);
    return nullptr;
  }
  StagingRing* const ring = needs.staging ? staging() : nullptr;
  const auto reads = ring != nullptr ? std::make_shared<Reads>() : nullptr;
  const std::lock_guard lock(issuing_);
  try {
    for (const CopyBatch& batch : plan_copies(request, kernels, ring, reads)) enqueue(batch, ring);
    if (ring != nullptr) enqueue_host_function(*ring, ring->next(), /*arrive=*/false);
  } catch (...) {
    settle(ring, reads);
    throw;
  }
  return reads;
}

void CopyIssuer::enqueue(const CopyBatch& planned, StagingRing* ring) {
  wait_for(planned.after);
  if (planned.chunk) enqueue_host_function(*ring, *planned.chunk, /*arrive=*/true);
  Batch batch;
  for (const Landing& landing : planned.landings) {
    const Piece& piece = landing.piece;
    if (landing.cast) {
      enqueue_cast(landing);
    } else {
      batch.add(piece.dst, landing.from, piece.count * scalar_size(piece.source->wanted));
    }
  }
  enqueue(batch);
}

void CopyIssuer::wait_for(const std::vector<EventPtr>& events) {
  for (const EventPtr& event : events) {
    if (!event) continue;
    const auto& recorded = static_cast<const CudaEvent&>(*event);
    if (recorded.known_done()) continue;
    DYNSWAP_CUDA(cudaStreamWaitEvent(stream_, recorded.handle(), 0), "");
  }
}

// ------------------------------------------------------------------------------------ pinned sources

void CopyIssuer::Batch::add(void* dst, const void* src, std::size_t bytes) {
  dsts.push_back(dst);
  srcs.push_back(src);
  sizes.push_back(bytes);
}

void CopyIssuer::Batch::clear() {
  dsts.clear();
  srcs.clear();
  sizes.clear();
}

void CopyIssuer::enqueue(Batch& batch) {
  const std::size_t count = batch.sizes.size();
#if CUDART_VERSION >= 12080
  if (count > 1 && batches_) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
#if CUDART_VERSION >= 13000
    const cudaError_t error = cudaMemcpyBatchAsync(batch.dsts.data(), batch.srcs.data(), batch.sizes.data(),
                                                   count, &attributes, &first, 1, stream_);
#else
    std::size_t failed = 0;
    const cudaError_t error =
        cudaMemcpyBatchAsync(batch.dsts.data(), const_cast<void**>(batch.srcs.data()), batch.sizes.data(),
                             count, &attributes, &first, 1, &failed, stream_);
#endif
    if (error == cudaSuccess) {
      batch.clear();
      return;
    }
    // The driver may be older than the runtime that is linked.
    if (error != cudaErrorNotSupported && error != cudaErrorCallRequiresNewerDriver) {
      throw_cuda_error(error, "cudaMemcpyBatchAsync", std::to_string(count) + " copies" + advice(error));
    }
    (void)cudaGetLastError();
    batches_ = false;
  }
#endif
  for (std::size_t i = 0; i < count; ++i) {
    const cudaError_t error =
        cudaMemcpyAsync(batch.dsts[i], batch.srcs[i], batch.sizes[i], cudaMemcpyHostToDevice, stream_);
    if (error != cudaSuccess)
      throw_cuda_error(error, "cudaMemcpyAsync", std::to_string(batch.sizes[i]) + " bytes" + advice(error));
  }
  batch.clear();
}

/// Note [The scratch block]: a cast lands here first, chunk by chunk, always at the start: the stream's
/// order keeps the copy of a chunk behind the kernel of the one before. It is not part of the budget, and
/// smaller where there is no room for it.
void CopyIssuer::enqueue_cast(const Landing& landing) {
  const Piece& piece = landing.piece;
  const Source& source = *piece.source;
  const std::size_t size = scalar_size(source.stored);
  for (std::uint64_t done = 0; done < piece.count;) {
    const std::uint64_t count = std::min<std::uint64_t>(piece.count - done, scratch_bytes_ / size);
    Batch batch;
    batch.add(scratch_.get(), landing.from + done * size, count * size);
    enqueue(batch);
    const cudaError_t error = launch_cast(piece.dst + done * scalar_size(source.wanted), source.wanted,
                                          scratch_.get(), source.stored, count, stream_);
    if (error != cudaSuccess)
      throw_cuda_error(error, "cudaLaunchKernel",
                       "a cast of " + std::to_string(count) + " elements of '" + source.name + "'");
    done += count;
  }
}

// ------------------------------------------------------------------------------------ staged sources

void CopyIssuer::enqueue_host_function(StagingRing& ring, std::uint64_t chunk, bool arrive) {
  auto progress = std::make_unique<Progress>(Progress{ring, chunk, arrive});
  DYNSWAP_CUDA(cudaLaunchHostFunc(stream_, &tell, progress.get()), "chunk " << chunk);
  (void)progress.release();  // tell() owns it now
}

/// After an error between the chunks of a request: until the stream and the readers are through with it,
/// its buffers and its destination are not anybody else's.
void CopyIssuer::settle(StagingRing* ring, const std::shared_ptr<Reads>& reads) noexcept {
  DYNSWAP_CUDA_NOEXCEPT(cudaStreamSynchronize(stream_));
  if (ring == nullptr) return;
  ring->give_up(*reads);
  ring->passed(ring->next());
}

// -------------------------------------------------------------------------------------------- set-up

StagingRing* CopyIssuer::staging() {
  {
    const std::lock_guard lock(setup_);
    if (ring_) return ring_.get();
  }
  const std::size_t bytes = options_.staging_bytes * options_.staging_buffers;
  void* block = nullptr;
  DYNSWAP_CUDA(cudaHostAlloc(&block, bytes, cudaHostAllocPortable),
               "pinned staging buffers, bytes " << bytes);
  const std::shared_ptr<std::byte> owner(
      static_cast<std::byte*>(block), [](std::byte* memory) { DYNSWAP_CUDA_NOEXCEPT(cudaFreeHost(memory)); });
  std::vector<StagingRing::Buffer> buffers;
  for (unsigned i = 0; i < options_.staging_buffers; ++i) {
    buffers.emplace_back(owner, owner.get() + i * options_.staging_bytes);
  }
  auto ring = std::make_unique<StagingRing>(std::move(buffers), options_.staging_bytes,
                                            static_cast<int>(options_.readers), options_.cast);
  const std::lock_guard lock(setup_);
  if (!ring_) ring_ = std::move(ring);
  return ring_.get();
}

void CopyIssuer::prepare_scratch() {
  {
    const std::lock_guard lock(setup_);
    if (scratch_) return;
  }
  Memory scratch;
  std::size_t bytes = kScratchBytes;
  while (!scratch) {
    try {
      scratch = allocate_(bytes);
    } catch (const OutOfMemory&) {
      if (bytes <= kLeastScratchBytes) throw;
      bytes /= 2;
    }
  }
  const std::lock_guard lock(setup_);
  if (scratch_) return;
  scratch_ = std::move(scratch);
  scratch_bytes_ = bytes;
}

bool CopyIssuer::wait(const Reads& reads, std::chrono::milliseconds patience) {
  return staging()->wait(reads, patience);
}

void CopyIssuer::close() noexcept {
  StagingRing* ring = nullptr;
  {
    const std::lock_guard lock(setup_);
    ring = ring_.get();
  }
  if (ring != nullptr) ring->close();
}

void CopyIssuer::release_scratch() noexcept {
  Memory taken;
  const std::lock_guard lock(setup_);
  taken.swap(scratch_);
}

}  // namespace dynswap
