#include "cuda/copy_issuer.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/check.h"
#include "cuda/cast_kernels.h"
#include "cuda/cuda_check.h"
#include "cuda/events.h"
#include "io/reader.h"

namespace dynswap {
namespace {

constexpr std::size_t kSector = 4096;         // of the disk; File reads straight into place on its phase
constexpr std::size_t kBufferAlignment = 16;  // what a cast kernel loads at once
constexpr std::size_t kFragment = 1u << 20;   // a piece is not cut for less than this
constexpr std::size_t kScratchBytes = 16u << 20;
constexpr std::size_t kLeastScratchBytes = 1u << 18;
constexpr auto kPatience = std::chrono::milliseconds(100);

/// Throws for any other reason why a kernel could not be launched.
bool has_kernels() {
  const cudaError_t error = kernels_for_this_device();
  if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction)
    DYNSWAP_CUDA(error, "the cast kernels");
  (void)cudaGetLastError();
  return error == cudaSuccess;
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

/// The element type in which a staged source lies in its buffer.
Scalar carried(const Source& source, bool cast_by_readers) noexcept {
  return cast_by_readers ? source.wanted : source.stored;
}

/// The source as a reader shall read it.
SourcePtr as_carried(const SourcePtr& source, bool cast_by_readers) {
  if (carried(*source, cast_by_readers) == source->wanted) return source;
  auto unchanged = std::make_shared<Source>(*source);
  unchanged->wanted = source->stored;
  return unchanged;
}

/// Where in its buffer a piece begins that comes after `used` bytes.
std::size_t place(const Piece& piece, std::size_t used, bool cast_by_readers) noexcept {
  const Source& source = *piece.source;
  if (!source.file || cast_by_readers) {
    return (used + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment;
  }
  const std::size_t phase = (source.offset + piece.first * scalar_size(source.stored)) % kSector;
  return used + (phase + kSector - used % kSector) % kSector;
}

/// Where the device reads a piece of a pinned source.
const std::byte* in_reach(const Source& source, const Piece& piece) {
  const std::size_t first = piece.first * scalar_size(source.stored);
  const std::byte* const master = source.address + first;
  if (!source.pinned_copy) return master;
  // See Note [A small master has a page-locked copy]
  std::byte* const copy = source.pinned_copy->bytes.get() + first;
  const std::size_t bytes = piece.count * scalar_size(source.stored);
  const std::lock_guard lock(source.pinned_copy->refreshing);
  if (source.mapped || std::memcmp(copy, master, bytes) != 0) fetch_from_memory(source, first, copy, bytes);
  return copy;
}

}  // namespace

bool CopyIssuer::cast_by_readers(const Source& source) const noexcept {
  if (!source.cast()) return false;
  if (!kernels_ || !device_casts_to(source.wanted)) return true;
  const bool in_reach = source.pinned && !source.file;
  return !in_reach && scalar_size(source.wanted) < scalar_size(source.stored);
}

CopyPath CopyIssuer::copy_path(const Source& source) const noexcept {
  if (!source.pinned || source.file || cast_by_readers(source)) return CopyPath::staged;
  return source.cast() ? CopyPath::cast_after : CopyPath::direct;
}

CopyIssuer::CopyIssuer(const CudaOptions& options, cudaStream_t stream,
                       std::function<Memory(std::size_t)> allocate)
    : options_(options), stream_(stream), allocate_(std::move(allocate)), kernels_(has_kernels()) {}

std::shared_ptr<Reads> CopyIssuer::issue(const CopyRequest& request) {
  bool is_staged = false;
  bool is_cast = false;
  bool lacks_kernel = false;
  for (const Step& step : request.steps) {
    for (const Piece& piece : step.pieces) {
      const CopyPath path = copy_path(*piece.source);
      is_staged = is_staged || path == CopyPath::staged;
      is_cast = is_cast || (piece.source->cast() && !cast_by_readers(*piece.source));
      lacks_kernel = lacks_kernel || (!kernels_ && piece.source->cast());
    }
  }
  if (lacks_kernel && options_.warn && !warned_.exchange(true)) {
    options_.warn(
        "this build has no kernels for the compute capability of CUDA device " +
        std::to_string(options_.device) +
        " (cudaErrorNoKernelImageForDevice): weights are cast on the host, which is slower. Rebuild with "
        "TORCH_CUDA_ARCH_LIST set to the device's capability, such as 8.6; "
        "torch.cuda.get_device_capability() tells it");
  }
  if (is_cast) prepare_scratch();
  if (!is_staged && !is_cast) {
    for (const Step& step : request.steps) issue_step(step, {});
    return nullptr;
  }
  Staged staged;
  if (is_staged) staged = {staging(), std::make_shared<Reads>()};
  const std::lock_guard lock(issuing_);
  try {
    for (const Step& step : request.steps) issue_step(step, staged);
    if (is_staged) enqueue_host_function(*staged.ring, staged.ring->next(), /*arrive=*/false);
  } catch (...) {
    settle(staged);
    throw;
  }
  return staged.reads;
}

void CopyIssuer::issue_step(const Step& step, const Staged& staged) {
  wait_for(step.after);
  Batch batch;
  Chunk chunk;
  for (const Piece& piece : step.pieces) {
    if (piece.count == 0) continue;
    const Source& source = *piece.source;
    switch (copy_path(source)) {
      case CopyPath::direct:
        batch.add(piece.dst, in_reach(source, piece), piece.count * scalar_size(source.stored));
        break;
      case CopyPath::cast_after:
        enqueue_cast(piece, in_reach(source, piece));
        break;
      case CopyPath::staged:
        stage(piece, chunk, staged);
        break;
    }
  }
  enqueue(batch);
  enqueue_chunk(chunk, staged);
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
      DYNSWAP_CUDA(error, "cudaMemcpyBatchAsync of " << count << " copies");
    }
    (void)cudaGetLastError();
    batches_ = false;
  }
#endif
  for (std::size_t i = 0; i < count; ++i) {
    DYNSWAP_CUDA(
        cudaMemcpyAsync(batch.dsts[i], batch.srcs[i], batch.sizes[i], cudaMemcpyHostToDevice, stream_),
        batch.sizes[i] << " bytes from " << batch.srcs[i] << " to " << batch.dsts[i]);
  }
  batch.clear();
}

/// Note [The scratch block]: a cast lands here first, chunk by chunk, always at the start: the stream's
/// order keeps the copy of a chunk behind the kernel of the one before. It is not part of the budget, and
/// smaller where there is no room for it.
void CopyIssuer::enqueue_cast(const Piece& piece, const std::byte* stored) {
  const Source& source = *piece.source;
  const std::size_t size = scalar_size(source.stored);
  for (std::uint64_t done = 0; done < piece.count;) {
    const std::uint64_t count = std::min<std::uint64_t>(piece.count - done, scratch_bytes_ / size);
    Batch batch;
    batch.add(scratch_.get(), stored + done * size, count * size);
    enqueue(batch);
    DYNSWAP_CUDA(launch_cast(piece.dst + done * scalar_size(source.wanted), source.wanted, scratch_.get(),
                             source.stored, count, stream_),
                 count << " elements of '" << source.name << "'");
    done += count;
  }
}

// ------------------------------------------------------------------------------------ staged sources

void CopyIssuer::stage(const Piece& piece, Chunk& chunk, const Staged& staged) {
  const std::size_t capacity = staged.ring->buffer_bytes();
  const Source& source = *piece.source;
  const bool by_readers = cast_by_readers(source);
  const std::size_t size = scalar_size(carried(source, by_readers));
  const SourcePtr read_as = as_carried(piece.source, by_readers);
  Piece rest = piece;
  while (rest.count > 0) {
    const std::size_t offset = place(rest, chunk.used, by_readers);
    const std::uint64_t room = offset < capacity ? (capacity - offset) / size : 0;
    Piece part = rest;
    if (room < rest.count) {
      // Whole sectors, so that the rest keeps its phase.
      part.count = room / kSector * kSector;
      if (part.count * size < kFragment && chunk.used > 0) part.count = 0;
      if (part.count == 0) {
        enqueue_chunk(chunk, staged);
        continue;
      }
    }
    chunk.reads.push_back({{read_as, part.first, part.count, nullptr}, offset});
    chunk.landings.push_back({part, offset});
    chunk.used = offset + part.count * size;
    rest.first += part.count;
    rest.count -= part.count;
    rest.dst += part.count * scalar_size(source.wanted);
  }
}

void CopyIssuer::enqueue_chunk(Chunk& chunk, const Staged& staged) {
  if (chunk.reads.empty()) return;
  const StagingRing::Ticket ticket = staged.ring->add(std::move(chunk.reads), staged.reads);
  enqueue_host_function(*staged.ring, ticket.chunk, /*arrive=*/true);
  Batch batch;
  for (const Landing& landing : chunk.landings) {
    const Source& source = *landing.piece.source;
    const std::byte* buffer = ticket.buffer + landing.offset;
    if (carried(source, cast_by_readers(source)) != source.wanted) {
      enqueue_cast(landing.piece, buffer);
    } else {
      batch.add(landing.piece.dst, buffer, landing.piece.count * scalar_size(source.wanted));
    }
  }
  enqueue(batch);
  chunk = {};
}

void CopyIssuer::enqueue_host_function(StagingRing& ring, std::uint64_t chunk, bool arrive) {
  auto progress = std::make_unique<Progress>(Progress{ring, chunk, arrive});
  DYNSWAP_CUDA(cudaLaunchHostFunc(stream_, &tell, progress.get()), "chunk " << chunk);
  (void)progress.release();  // tell() owns it now
}

/// After an error between the chunks of a request: until the stream and the readers are through with it,
/// its buffers and its destination are not anybody else's.
void CopyIssuer::settle(const Staged& staged) noexcept {
  DYNSWAP_CUDA_NOEXCEPT(cudaStreamSynchronize(stream_));
  if (staged.ring == nullptr) return;
  staged.ring->passed(staged.ring->next());
  try {
    while (!staged.ring->wait(*staged.reads, kPatience)) {
    }
  } catch (const std::exception&) {
    // the error that led here is the one to tell
  }
  staged.ring->passed(staged.ring->next());
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
