#include "transfer/staging.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/check.h"
#include "core/protection.h"
#include "io/reader.h"

namespace dynswap {

StagingRing::StagingRing(std::vector<Buffer> buffers, std::size_t buffer_bytes, int readers, CastFn cast)
    : buffers_(std::move(buffers)), buffer_bytes_(buffer_bytes), cast_(cast), readers_(readers) {
  charge_.must_grow(buffers_.size() * buffer_bytes_);
  DYNSWAP_CHECK(!buffers_.empty(), "a staging ring takes at least one buffer");
}

StagingRing::Ticket StagingRing::add(std::vector<StagedPiece> pieces, const std::shared_ptr<Reads>& reads) {
  Ticket ticket{};
  std::vector<std::uint64_t> begin;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw ClosedError("the backend is closed");
    ticket.chunk = first_ + chunks_.size();
    ticket.buffer = buffer_of(ticket.chunk);
    chunks_.push_back({std::move(pieces), reads, false});
    ++reads->outstanding_;
    begin = startable();
  }
  start(begin);
  return ticket;
}

std::uint64_t StagingRing::next() const {
  const std::lock_guard lock(mutex_);
  return first_ + chunks_.size();
}

std::vector<std::uint64_t> StagingRing::startable() {
  std::vector<std::uint64_t> chunks;
  const std::uint64_t end = first_ + chunks_.size();
  while (started_ < end && (started_ < passed_ + buffers_.size() || !PROTECTED(staged_read_waits))) {
    if (!chunks_[started_ - first_].over) chunks.push_back(started_);
    ++started_;
  }
  return chunks;
}

void StagingRing::start(const std::vector<std::uint64_t>& chunks) {
  for (const std::uint64_t number : chunks) {
    const auto cancel = [this, number] {
      finish(number,
             std::make_exception_ptr(ClosedError("the backend was closed before the weight was read")));
    };
    if (!readers_.submit({[this, number] { read(number); }, cancel})) cancel();
  }
}

void StagingRing::read(std::uint64_t number) noexcept {
  std::exception_ptr error;
  try {
    const std::vector<StagedPiece>* pieces = nullptr;
    {
      const std::lock_guard lock(mutex_);
      pieces = &chunks_[number - first_].pieces;  // stays there until finish()
    }
    std::vector<PieceRead> reads;
    reads.reserve(pieces->size());
    for (const StagedPiece& staged : *pieces)
      reads.push_back({&staged.piece, buffer_of(number) + staged.offset});
    read_pieces(reads, cast_, ReadMode::quick);
  } catch (...) {
    error = std::current_exception();
  }
  finish(number, std::move(error));
}

void StagingRing::finish(std::uint64_t number, std::exception_ptr error) noexcept {
  std::vector<StagedPiece> read;  // let go of without the lock
  {
    const std::lock_guard lock(mutex_);
    Chunk& chunk = chunks_[number - first_];
    read.swap(chunk.pieces);
    chunk.over = true;
    --chunk.reads->outstanding_;
    if (error && !chunk.reads->error_) chunk.reads->error_ = std::move(error);
  }
  changed_.notify_all();
}

void StagingRing::passed(std::uint64_t chunk) noexcept {
  std::vector<std::uint64_t> begin;
  {
    const std::lock_guard lock(mutex_);
    passed_ = std::max(passed_, chunk);
    while (!chunks_.empty() && first_ < passed_ && chunks_.front().over) {
      chunks_.pop_front();
      ++first_;
    }
    started_ = std::max(started_, first_);
    begin = startable();
  }
  start(begin);
}

void StagingRing::arrive(std::uint64_t chunk) noexcept {
  passed(chunk);
  await(chunk);
}

void StagingRing::await(std::uint64_t chunk) noexcept {
  if (!PROTECTED(staged_copy_waits)) return;
  std::unique_lock lock(mutex_);
  static_cast<void>(changed_.wait(lock, [&] { return chunk < first_ || chunks_[chunk - first_].over; }));
}

bool StagingRing::wait(const Reads& reads, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, patience, [&] { return reads.outstanding_ == 0; })) {
    if (!changed_.here()) throw ClosedError(kOnlyInParent);
    return false;
  }
  if (reads.error_) std::rethrow_exception(reads.error_);
  return true;
}

void StagingRing::give_up(const Reads& reads) noexcept {
  std::unique_lock lock(mutex_);
  for (std::uint64_t number = started_; number < first_ + chunks_.size(); ++number) {
    Chunk& chunk = chunks_[number - first_];
    if (chunk.reads.get() != &reads || chunk.over) continue;
    chunk.over = true;
    --chunk.reads->outstanding_;
  }
  static_cast<void>(changed_.wait(lock, [&] { return reads.outstanding_ == 0; }));
}

void StagingRing::close() noexcept {
  std::vector<std::uint64_t> unread;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (const std::uint64_t end = first_ + chunks_.size(); started_ < end; ++started_) {
      if (!chunks_[started_ - first_].over) unread.push_back(started_);
    }
  }
  readers_.close();
  start(unread);  // the readers are gone: each fails
}

}  // namespace dynswap
