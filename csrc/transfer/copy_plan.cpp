#include "transfer/copy_plan.h"

#include <cstring>
#include <mutex>
#include <utility>

#include "io/reader.h"

namespace dynswap {
namespace {

constexpr std::size_t kSector = 4096;         // of the disk; File reads straight into place on its phase
constexpr std::size_t kBufferAlignment = 16;  // what a cast kernel loads at once
constexpr std::size_t kFragment = 1u << 20;   // a piece is not cut for less than this

/// The element type in which a staged source lies in its buffer.
Scalar carried(const Source& source, bool by_readers) noexcept {
  return by_readers ? source.wanted : source.stored;
}

/// The source as a reader shall read it.
SourcePtr as_carried(const SourcePtr& source, bool by_readers) {
  if (carried(*source, by_readers) == source->wanted) return source;
  auto unchanged = std::make_shared<Source>(*source);
  unchanged->wanted = source->stored;
  return unchanged;
}

/// Where in its buffer a piece begins that comes after `used` bytes.
std::size_t place(const Piece& piece, std::size_t used, bool by_readers) noexcept {
  const Source& source = *piece.source;
  if (!source.file || by_readers) {
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
  std::byte* const copy = source.pinned_copy->bytes.get() + first;
  // Of a large master: refresh_pinned_copies() has made it current.
  if (source.pinned_copy->writes) return copy;
  // See Note [A small master has a page-locked copy]
  const std::size_t bytes = piece.count * scalar_size(source.stored);
  const std::lock_guard lock(source.pinned_copy->refreshing);
  if (source.mapped || std::memcmp(copy, master, bytes) != 0) fetch_from_memory(source, first, copy, bytes);
  return copy;
}

/// Brings the copy of a large master up to date if that pays. Returns whether the device may read it.
bool refresh(const Source& source) {
  PinnedCopy& copy = *source.pinned_copy;
  const std::lock_guard lock(copy.refreshing);
  const std::optional<std::uint64_t> writes = copy.writes();
  if (!writes) return false;
  if (copy.as_of == writes) return true;
  if (std::exchange(copy.seen, writes) != writes) return false;
  fetch_from_memory(source, 0, copy.bytes.get(), source.stored_bytes());
  copy.as_of = writes;
  return true;
}

/// Gathers staged pieces into chunks, each as large as a buffer.
class Chunks {
 public:
  Chunks(StagingRing* ring, const std::shared_ptr<Reads>& reads, bool device_casts,
         std::vector<CopyBatch>& batches)
      : ring_(ring), reads_(reads), device_casts_(device_casts), batches_(batches) {}

  void add(const Piece& piece) {
    const std::size_t capacity = ring_->buffer_bytes();
    const Source& source = *piece.source;
    const bool by_readers = cast_by_readers(source, device_casts_);
    const std::size_t size = scalar_size(carried(source, by_readers));
    const SourcePtr read_as = as_carried(piece.source, by_readers);
    Piece rest = piece;
    while (rest.count > 0) {
      const std::size_t offset = place(rest, used_, by_readers);
      const std::uint64_t room = offset < capacity ? (capacity - offset) / size : 0;
      Piece part = rest;
      if (room < rest.count) {
        // Whole sectors, so that the rest keeps its phase.
        part.count = room / kSector * kSector;
        if (part.count * size < kFragment && used_ > 0) part.count = 0;
        if (part.count == 0) {
          finish();
          continue;
        }
      }
      parts_.push_back({{read_as, part.first, part.count, nullptr}, offset});
      landings_.push_back({part, nullptr, carried(source, by_readers) != source.wanted});
      used_ = offset + part.count * size;
      rest.first += part.count;
      rest.count -= part.count;
      rest.dst += part.count * scalar_size(source.wanted);
    }
  }

  /// Queues the chunk that is not full.
  void finish() {
    if (parts_.empty()) return;
    std::vector<std::size_t> offsets;
    for (const StagedPiece& part : parts_) offsets.push_back(part.offset);
    const StagingRing::Ticket ticket = ring_->add(std::move(parts_), reads_);
    for (std::size_t i = 0; i < landings_.size(); ++i) landings_[i].from = ticket.buffer + offsets[i];
    batches_.push_back({{}, ticket.chunk, std::move(landings_)});
    parts_.clear();
    landings_.clear();
    used_ = 0;
  }

 private:
  StagingRing* const ring_;
  const std::shared_ptr<Reads>& reads_;
  const bool device_casts_;
  std::vector<CopyBatch>& batches_;
  std::vector<StagedPiece> parts_;
  std::vector<Landing> landings_;
  std::size_t used_ = 0;
};

}  // namespace

bool cast_by_readers(const Source& source, bool device_casts) noexcept {
  if (!source.cast()) return false;
  if (!device_casts || !device_casts_to(source.wanted)) return true;
  const bool in_reach = source.pinned && !source.file;
  return !in_reach && scalar_size(source.wanted) < scalar_size(source.stored);
}

CopyPath copy_path(const Source& source, bool device_casts) noexcept {
  if (!source.pinned || source.file || cast_by_readers(source, device_casts)) return CopyPath::staged;
  return source.cast() ? CopyPath::cast_after : CopyPath::direct;
}

void refresh_pinned_copies(CopyRequest& request) {
  const Source* outdated = nullptr;  // pieces of one source follow each other
  SourcePtr staged;
  for (Step& step : request.steps) {
    for (Piece& piece : step.pieces) {
      const Source& source = *piece.source;
      if (!source.pinned_copy || !source.pinned_copy->writes) continue;
      if (&source != outdated && refresh(source)) continue;
      if (&source != outdated) {
        auto unpinned = std::make_shared<Source>(source);
        unpinned->pinned = false;
        unpinned->pinned_copy = nullptr;
        outdated = &source;
        staged = std::move(unpinned);
      }
      piece.source = staged;
    }
  }
}

CopyNeeds needs_of(const CopyRequest& request, bool device_casts) noexcept {
  CopyNeeds needs;
  for (const Step& step : request.steps) {
    for (const Piece& piece : step.pieces) {
      const Source& source = *piece.source;
      needs.staging = needs.staging || copy_path(source, device_casts) == CopyPath::staged;
      needs.casting = needs.casting || (source.cast() && !cast_by_readers(source, device_casts));
    }
  }
  return needs;
}

std::vector<CopyBatch> plan_copies(const CopyRequest& request, bool device_casts, StagingRing* ring,
                                   const std::shared_ptr<Reads>& reads) {
  std::vector<CopyBatch> batches;
  for (const Step& step : request.steps) {
    CopyBatch direct{step.after, std::nullopt, {}};
    for (const Piece& piece : step.pieces) {
      const CopyPath path = copy_path(*piece.source, device_casts);
      if (piece.count == 0 || path == CopyPath::staged) continue;
      direct.landings.push_back({piece, in_reach(*piece.source, piece), path == CopyPath::cast_after});
    }
    batches.push_back(std::move(direct));
    Chunks chunks(ring, reads, device_casts, batches);
    for (const Piece& piece : step.pieces) {
      if (piece.count > 0 && copy_path(*piece.source, device_casts) == CopyPath::staged) chunks.add(piece);
    }
    chunks.finish();
  }
  return batches;
}

}  // namespace dynswap
