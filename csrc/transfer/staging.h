// The ring of pinned buffers between a disk, or pageable memory, and the device. It makes no CUDA call:
// the buffers are given to it, and the stream's progress is told to it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "core/host_memory.h"
#include "io/worker_pool.h"
#include "platform/fork_safe.h"

namespace dynswap {

constexpr std::size_t kStagingBytes = 8u << 20;  ///< of one buffer
constexpr unsigned kStagingBuffers = 8;

/// The reads of one copy, and the first error among them.
class Reads {
 private:
  friend class StagingRing;
  std::size_t outstanding_ = 0;  ///< LOCK: the ring's mutex
  std::exception_ptr error_;     ///< LOCK: the ring's mutex
};

/// A piece, and where in its chunk's buffer it is read to.
struct StagedPiece {
  Piece piece;
  std::size_t offset = 0;
};

/// Note [A staged copy]: with CUDA, the thread that issues a copy neither reads nor waits. For each chunk
/// (what one buffer holds) it enqueues, in this order, a host function and the copies from the buffer to the
/// device, and at the end of the request one more host function. Readers fill the buffers meanwhile. The host
/// function of chunk c does two things, on the driver's own thread:
///   1. The stream has come as far as c, so all before c is copied: those buffers are free, and the reads
///      that waited for them begin.
///   2. It blocks the copy stream, and nothing else, until c has been read.
/// Chunk c lies in buffer c % buffers, so its read waits for chunk c - buffers, whose end the host
/// function of chunk c - buffers + 1 reports: always an earlier one of the same stream. Hence no host
/// function ever waits for what comes after it, however many rings share the driver's thread.
///
/// Over torch's streams, which have no host functions, a thread of the backend calls passed() and await()
/// itself before it enqueues the copies of a chunk: see Note [A copy that is issued later].
///
/// Invariant: chunks are added in the order in which they are enqueued on the stream.
///
/// Thread-safe. In a forked child, which has no readers, nothing waits for them. Tear-down order: close(),
/// then the stream is synchronised, then the ring may go.
class StagingRing {
 public:
  using Buffer = std::shared_ptr<std::byte>;

  StagingRing(std::vector<Buffer> buffers, std::size_t buffer_bytes, int readers, CastFn cast);
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  std::size_t buffer_bytes() const noexcept { return buffer_bytes_; }
  std::size_t buffers() const noexcept { return buffers_.size(); }

  struct Ticket {
    std::uint64_t chunk;
    const std::byte* buffer;  ///< where the chunk is, once arrive(chunk) has returned
  };

  /// Queues the read of one chunk. `reads` counts it.
  Ticket add(std::vector<StagedPiece> pieces, const std::shared_ptr<Reads>& reads);

  /// The number that the next chunk gets: what passed() is told at the end of a request.
  std::uint64_t next() const;

  /// Notes that everything before `chunk` is copied, as the stream tells. Does not block.
  void passed(std::uint64_t chunk) noexcept;

  /// Blocks until the chunk, which may have been passed, is in its buffer, or its read has failed.
  void await(std::uint64_t chunk) noexcept;

  /// Calls passed(chunk), then await(chunk).
  void arrive(std::uint64_t chunk) noexcept;

  /// Blocks until all these reads are over, `patience` at most. False: not yet. Throws their first error; in
  /// a forked child, ClosedError if they are not over.
  bool wait(const Reads& reads, std::chrono::milliseconds patience);

  /// Drops those of these reads that have not begun, and waits for those that have: their copies will not be
  /// enqueued, and passed() can be told so.
  void give_up(const Reads& reads) noexcept;

  /// Fails the reads that have not begun, waits for those that have, and stops the readers. Idempotent.
  void close() noexcept;

 private:
  struct Chunk {
    std::vector<StagedPiece> pieces;
    std::shared_ptr<Reads> reads;
    bool over = false;
  };

  std::byte* buffer_of(std::uint64_t chunk) const { return buffers_[chunk % buffers_.size()].get(); }
  std::vector<std::uint64_t> startable();  // LOCK: mutex_ is held
  void start(const std::vector<std::uint64_t>& chunks);
  void read(std::uint64_t number) noexcept;
  void finish(std::uint64_t number, std::exception_ptr error) noexcept;

  const std::vector<Buffer> buffers_;
  const std::size_t buffer_bytes_;
  const CastFn cast_;
  HostMemory::Charge charge_{HostUse::staging};

  mutable Mutex mutex_;
  Condition changed_;
  // LOCK: mutex_ guards all that follows.
  std::deque<Chunk> chunks_;   ///< from number first_ on; erased once passed and read
  std::uint64_t first_ = 0;    ///< Invariant: first_ <= passed_, first_ <= started_
  std::uint64_t started_ = 0;  ///< reads of the chunks before this one have been given to the readers
  std::uint64_t passed_ = 0;   ///< the chunks before this one are copied
  bool closed_ = false;

  WorkerPool readers_;  // last: its threads use the members above
};

}  // namespace dynswap
