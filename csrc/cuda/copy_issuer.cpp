#include "cuda/copy_issuer.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <utility>

#include "core/align.h"
#include "core/check.h"
#include "cuda/cast_kernels.h"
#include "cuda/cuda_check.h"
#include "cuda/decode_kernels.h"

namespace dynswap {
namespace {

constexpr std::size_t kScratchBytes = 16u << 20;
constexpr std::size_t kLeastScratchBytes = 1u << 18;
constexpr std::size_t kIndexAlignment = 256;  // more than any load of the kernel needs
constexpr std::size_t kLeastBlock = 256;      // with this many bytes a block, its index is a small part
constexpr auto kPatience = std::chrono::milliseconds(100);

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
      if (piece.source->converted()) return true;
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

CudaCopyIssuer::CudaCopyIssuer(int device, std::function<void(const std::string&)> warn,
                               std::shared_ptr<TransferStream> stream)
    : device_(device), warn_(std::move(warn)), stream_(std::move(stream)), no_kernels_(why_no_kernels()) {}

void CudaCopyIssuer::issue(const CopyRequest& request, const StreamEventPtr& copied) {
  if (copied->clock()) {
    if (!request.steps.empty()) stream_->wait_for(request.steps.front().after);
    stream_->begin(*copied);
  }
  copied->reads = enqueue(request);
  copied->record(stream_->handle());
}

/// Returns the request's reads; null if it has none.
std::shared_ptr<Reads> CudaCopyIssuer::enqueue(const CopyRequest& request) {
  const bool kernels = no_kernels_ == cudaSuccess;
  const DeviceAbilities abilities{.casts = kernels, .decodes = kernels};
  const CopyNeeds needs = needs_of(request, abilities);
  if (!kernels && lacks_kernel(request) && warn_ && !warned_.exchange(true)) {
    warn_("this build has no kernels that CUDA device " + std::to_string(device_) + " can run (" +
          cudaGetErrorName(no_kernels_) +
          "): weights are cast, and decoded, on the host, which is slower. Rebuild with "
          "TORCH_CUDA_ARCH_LIST set to the device's capability, such as 8.6; "
          "torch.cuda.get_device_capability() tells it");
  }
  if (needs.converting) prepare_scratch();
  if (!needs.staging && !needs.converting) {
    for (const CopyBatch& batch : plan_copies(request, abilities, nullptr, nullptr)) enqueue(batch, nullptr);
    return nullptr;
  }
  StagingRing* const ring = needs.staging ? staging() : nullptr;
  const auto reads = ring != nullptr ? std::make_shared<Reads>() : nullptr;
  const std::lock_guard lock(issuing_);
  try {
    for (const CopyBatch& batch : plan_copies(request, abilities, ring, reads)) enqueue(batch, ring);
    if (ring != nullptr) enqueue_host_function(*ring, ring->next(), /*arrive=*/false);
  } catch (...) {
    settle(ring, reads);
    throw;
  }
  return reads;
}

void CudaCopyIssuer::enqueue(const CopyBatch& planned, StagingRing* ring) {
  stream_->wait_for(planned.after);
  if (planned.chunk) enqueue_host_function(*ring, *planned.chunk, /*arrive=*/true);
  Batch batch;
  for (const Landing& landing : planned.landings) {
    const Piece& piece = landing.piece;
    if (landing.index != nullptr) {
      enqueue_decode(landing);
    } else if (landing.convert) {
      enqueue_cast(landing);
    } else {
      batch.add(piece.dst, landing.from, piece.count * scalar_size(piece.source->wanted));
    }
  }
  enqueue(batch);
}

// ------------------------------------------------------------------------------------ pinned sources

void CudaCopyIssuer::Batch::add(void* dst, const void* src, std::size_t bytes) {
  dsts.push_back(dst);
  srcs.push_back(src);
  sizes.push_back(bytes);
}

void CudaCopyIssuer::Batch::clear() {
  dsts.clear();
  srcs.clear();
  sizes.clear();
}

void CudaCopyIssuer::enqueue(Batch& batch) {
  const std::size_t count = batch.sizes.size();
#if CUDART_VERSION >= 12080
  if (count > 1 && batches_) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
#if CUDART_VERSION >= 13000
    const cudaError_t error = cudaMemcpyBatchAsync(batch.dsts.data(), batch.srcs.data(), batch.sizes.data(),
                                                   count, &attributes, &first, 1, handle());
#else
    std::size_t failed = 0;
    const cudaError_t error =
        cudaMemcpyBatchAsync(batch.dsts.data(), const_cast<void**>(batch.srcs.data()), batch.sizes.data(),
                             count, &attributes, &first, 1, &failed, handle());
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
        cudaMemcpyAsync(batch.dsts[i], batch.srcs[i], batch.sizes[i], cudaMemcpyHostToDevice, handle());
    if (error != cudaSuccess)
      throw_cuda_error(error, "cudaMemcpyAsync", std::to_string(batch.sizes[i]) + " bytes" + advice(error));
  }
  batch.clear();
}

/// Note [The scratch block]: what is cast or decoded lands here first, chunk by chunk, always at the start:
/// the stream's order keeps the copy of a chunk behind the kernel of the one before. It is not part of the
/// budget, and smaller where there is no room for it.
void CudaCopyIssuer::enqueue_cast(const Landing& landing) {
  const Piece& piece = landing.piece;
  const Source& source = *piece.source;
  const std::size_t size = scalar_size(source.stored);
  for (std::uint64_t done = 0; done < piece.count;) {
    const std::uint64_t count = std::min<std::uint64_t>(piece.count - done, scratch_bytes_ / size);
    Batch batch;
    batch.add(scratch_.get(), landing.from + done * size, count * size);
    enqueue(batch);
    const cudaError_t error = launch_cast(piece.dst + done * scalar_size(source.wanted), source.wanted,
                                          scratch_.get(), source.stored, count, handle());
    if (error != cudaSuccess)
      throw_cuda_error(error, "cudaLaunchKernel",
                       "a cast of " + std::to_string(count) + " elements of '" + source.name + "'");
    done += count;
  }
}

/// Coded bytes land in the scratch block behind their index.
void CudaCopyIssuer::enqueue_decode(const Landing& landing) {
  const Piece& piece = landing.piece;
  const Source& source = *piece.source;
  const Coding& coding = *source.coding;
  const std::uint64_t before = source.stored_range(piece.first, piece.count).begin;
  const std::uint64_t first_block = source.blocks(piece.first, piece.count).first;
  for (std::uint64_t done = 0; done < piece.count;) {
    const std::size_t room = scratch_bytes_ - scratch_bytes_ / kLeastBlock - kIndexAlignment;
    const std::uint64_t count =
        std::min(piece.count - done, source.elements_within(piece.first + done, room));
    const auto [block, blocks] = source.blocks(piece.first + done, count);
    const StoredRange range = source.stored_range(piece.first + done, count);
    const std::size_t index_bytes = (blocks + 1) * sizeof(std::uint64_t);
    std::byte* const coded = scratch_.get() + align_up(index_bytes, kIndexAlignment);
    Batch batch;
    batch.add(scratch_.get(), landing.index + (block - first_block) * sizeof(std::uint64_t), index_bytes);
    batch.add(coded, landing.from + (range.begin - before), range.bytes());
    enqueue(batch);
    const std::uint64_t begin = block * coding.block_weights;
    const std::uint64_t first = source.coded_first + piece.first + done - begin;
    const CodedBlocks coded_blocks{coded, reinterpret_cast<const std::uint64_t*>(scratch_.get()), blocks,
                                   std::min(coding.weights - begin, blocks * coding.block_weights)};
    const cudaError_t error = launch_decode(piece.dst + done * scalar_size(source.wanted), source.wanted,
                                            coded_blocks, source.stored, first, count, handle());
    if (error != cudaSuccess)
      throw_cuda_error(error, "cudaLaunchKernel",
                       "the decoding of " + std::to_string(count) + " elements of '" + source.name + "'");
    done += count;
  }
}

// ------------------------------------------------------------------------------------ staged sources

void CudaCopyIssuer::enqueue_host_function(StagingRing& ring, std::uint64_t chunk, bool arrive) {
  auto progress = std::make_unique<Progress>(Progress{ring, chunk, arrive});
  DYNSWAP_CUDA(cudaLaunchHostFunc(handle(), &tell, progress.get()), "chunk " << chunk);
  (void)progress.release();  // tell() owns it now
}

/// After an error between the chunks of a request: until the stream and the readers are through with it,
/// its buffers and its destination are not anybody else's.
void CudaCopyIssuer::settle(StagingRing* ring, const std::shared_ptr<Reads>& reads) noexcept {
  DYNSWAP_CUDA_NOEXCEPT(cudaStreamSynchronize(handle()));
  if (ring == nullptr) return;
  ring->give_up(*reads);
  ring->passed(ring->next());
}

// -------------------------------------------------------------------------------------------- set-up

StagingRing* CudaCopyIssuer::staging() {
  {
    const std::lock_guard lock(setup_);
    if (ring_) return ring_.get();
  }
  const std::size_t bytes = stream_->ring_bytes();
  void* block = nullptr;
  DYNSWAP_CUDA(cudaHostAlloc(&block, bytes, cudaHostAllocPortable),
               "pinned staging buffers, bytes " << bytes);
  auto ring = stream_->make_ring({static_cast<std::byte*>(block),
                                  [](std::byte* memory) { DYNSWAP_CUDA_NOEXCEPT(cudaFreeHost(memory)); }});
  const std::lock_guard lock(setup_);
  if (!ring_) ring_ = std::move(ring);
  return ring_.get();
}

void CudaCopyIssuer::prepare_scratch() {
  {
    const std::lock_guard lock(setup_);
    if (scratch_) return;
  }
  Memory scratch;
  std::size_t bytes = kScratchBytes;
  while (!scratch) {
    try {
      scratch = stream_->allocate(bytes);
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

void CudaCopyIssuer::wait(const Reads& reads) {
  StagingRing* const ring = staging();
  while (!ring->wait(reads, kPatience)) {
    // The driver calls no host function after a device error, so reads that wait for one never begin.
    const OnDevice scope(stream_->device());
    const cudaError_t state = cudaStreamQuery(handle());
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      continue;
    }
    if (state != cudaSuccess) throw_cuda_error(state, "cudaStreamQuery", "the copy stream");
  }
}

void CudaCopyIssuer::close() noexcept {
  StagingRing* ring = nullptr;
  {
    const std::lock_guard lock(setup_);
    ring = ring_.get();
  }
  if (ring != nullptr) ring->close();
}

void CudaCopyIssuer::release_memory() noexcept {
  Memory taken;
  const std::lock_guard lock(setup_);
  taken.swap(scratch_);
}

}  // namespace dynswap
