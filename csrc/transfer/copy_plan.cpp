#include "transfer/copy_plan.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "core/align.h"
#include "io/reader.h"

namespace dynswap {
namespace {

constexpr std::size_t kSector = 4096;         // of the disk; File reads straight into place on its phase
constexpr std::size_t kBufferAlignment = 16;  // what a cast kernel loads at once
constexpr std::size_t kFragment = 1u << 20;   // a piece is not cut for less than this

/// The source as a reader shall read it.
SourcePtr as_carried(const SourcePtr& source, bool by_readers) {
  if (by_readers || !source->converted()) return source;
  auto unchanged = std::make_shared<Source>(*source);
  unchanged->wanted = source->stored;
  if (!source->coding) return unchanged;
  unchanged->stored = unchanged->wanted = Scalar::raw8;
  unchanged->count = source->coding->blocks.back();
  unchanged->coding = nullptr;
  return unchanged;
}

/// Where in its buffer bytes begin that come after `used` others. `begin`: where they begin in the source's
/// file; nothing if they are not read straight from there.
std::size_t place(std::optional<std::uint64_t> begin, std::size_t used) noexcept {
  if (!begin) return align_up(used, kBufferAlignment);
  return used + (*begin % kSector + kSector - used % kSector) % kSector;
}

/// The part of the index that has a coded piece's blocks, and where the last one ends: bytes from its own
/// begin.
StoredRange range_of_index(const Source& source, std::uint64_t first, std::uint64_t count) {
  const BlockRange blocks = source.blocks(first, count);
  constexpr std::size_t kEntry = sizeof(std::uint64_t);
  return {blocks.first * kEntry, (blocks.first + blocks.count + 1) * kEntry};
}

/// The part of the index, for a reader to copy.
Piece index_of(const Piece& piece) {
  const std::shared_ptr<const Coding>& coding = piece.source->coding;
  auto index = std::make_shared<Source>();
  index->name = piece.source->name;
  index->count = coding->blocks.size() * sizeof(std::uint64_t);
  index->address = reinterpret_cast<const std::byte*>(coding->blocks.data());
  index->owner = coding;
  const StoredRange range = range_of_index(*piece.source, piece.first, piece.count);
  return {index, range.begin, range.bytes(), nullptr};
}

/// Where the device reads bytes of a pinned source.
const std::byte* in_reach(const Source& source, const StoredRange& range) {
  const std::byte* const master = source.address + range.begin;
  if (!source.pinned_copy) return master;
  std::byte* const copy = source.pinned_copy->bytes.get() + range.begin;
  // Of a large master: refresh_pinned_copies() has made it current.
  if (source.pinned_copy->writes) return copy;
  // See Note [A small master has a page-locked copy]
  const std::lock_guard lock(source.pinned_copy->refreshing);
  if (source.mapped || std::memcmp(copy, master, range.bytes()) != 0)
    fetch_from_memory(source, range.begin, copy, range.bytes());
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
  const auto fetch = [&](const StoredRange& range) {
    fetch_from_memory(source, range.begin, copy.bytes.get() + range.begin, range.bytes());
  };
  fetch(source.stored_range(0, source.count));
  if (source.coding) fetch(range_of_index(source, 0, source.count));
  copy.as_of = writes;
  return true;
}

/// Gathers staged pieces into chunks, each as large as a buffer.
class Chunks {
 public:
  Chunks(StagingRing* ring, const std::shared_ptr<Reads>& reads, DeviceAbilities device,
         std::vector<CopyBatch>& batches)
      : ring_(ring), reads_(reads), device_(device), batches_(batches) {}

  void add(const Piece& piece) {
    const Source& source = *piece.source;
    const bool by_readers = converted_by_readers(source, device_);
    const bool coded = source.coding && !by_readers;
    const std::size_t size = scalar_size(by_readers ? source.wanted : source.stored);  // unless it is coded
    const SourcePtr read_as = as_carried(piece.source, by_readers);
    const bool convert = source.converted() && !by_readers;
    Piece rest = piece;
    while (rest.count > 0) {
      std::optional<std::uint64_t> file_begin;
      if (source.file && !by_readers)
        file_begin = source.offset + source.stored_range(rest.first, rest.count).begin;
      const std::size_t offset = place(coded ? std::nullopt : file_begin, used_);
      const std::size_t capacity = ring_->buffer_bytes();
      const std::size_t room = offset < capacity ? capacity - offset : 0;
      Piece part = rest;
      part.count = std::min(rest.count, coded ? beside_index(source, rest.first, room) : room / size);
      if (part.count < rest.count) {
        // Whole sectors, so that the rest keeps its phase.
        if (!coded) part.count = part.count / kSector * kSector;
        if ((coded ? stored_bytes(part) : part.count * size) < kFragment && used_ > 0) part.count = 0;
        if (part.count == 0) {
          finish();
          continue;
        }
      }
      if (coded) {
        const Piece index = index_of(part);
        const StoredRange range = source.stored_range(part.first, part.count);
        const std::size_t begin = place(file_begin, offset + index.count);
        parts_.push_back({index, offset});
        parts_.push_back({{read_as, range.begin, range.bytes(), nullptr}, begin});
        landings_.push_back({{part, nullptr, convert}, begin, offset});
        used_ = begin + range.bytes();
      } else {
        parts_.push_back({{read_as, part.first, part.count, nullptr}, offset});
        landings_.push_back({{part, nullptr, convert}, offset, std::nullopt});
        used_ = offset + part.count * size;
      }
      rest.first += part.count;
      rest.count -= part.count;
      rest.dst += part.count * scalar_size(source.wanted);
    }
  }

  /// Queues the chunk that is not full.
  void finish() {
    if (parts_.empty()) return;
    const StagingRing::Ticket ticket = ring_->add(std::move(parts_), reads_);
    CopyBatch& batch = batches_.emplace_back(CopyBatch{{}, ticket.chunk, {}});
    for (auto& [landing, from, index] : landings_) {
      landing.from = ticket.buffer + from;
      if (index) landing.index = ticket.buffer + *index;
      batch.landings.push_back(std::move(landing));
    }
    parts_.clear();
    landings_.clear();
    used_ = 0;
  }

 private:
  /// How many coded elements have room, with the index of their blocks, each of which has kSector bytes at
  /// least, and in phase.
  static std::uint64_t beside_index(const Source& source, std::uint64_t first, std::size_t room) noexcept {
    const std::size_t around = (room / kSector + 2) * sizeof(std::uint64_t) + kSector;
    return room > around ? source.elements_within(first, room - around) : 0;
  }

  struct Staged {
    Landing landing;
    std::size_t from;                  ///< in the buffer
    std::optional<std::size_t> index;  ///< likewise
  };

  StagingRing* const ring_;
  const std::shared_ptr<Reads>& reads_;
  const DeviceAbilities device_;
  std::vector<CopyBatch>& batches_;
  std::vector<StagedPiece> parts_;
  std::vector<Staged> landings_;
  std::size_t used_ = 0;
};

}  // namespace

bool converted_by_readers(const Source& source, DeviceAbilities device) noexcept {
  if (!source.converted()) return false;
  if (source.cast() && (!device.casts || !device_casts_to(source.wanted))) return true;
  if (source.coding && !device.decodes) return true;
  const bool in_reach = source.pinned && !source.file;
  return !in_reach && source.wanted_bytes() < source.stored_bytes();
}

CopyPath copy_path(const Source& source, DeviceAbilities device) noexcept {
  if (!source.pinned || source.file || converted_by_readers(source, device)) return CopyPath::staged;
  return source.converted() ? CopyPath::convert_after : CopyPath::direct;
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

CopyNeeds needs_of(const CopyRequest& request, DeviceAbilities device) noexcept {
  CopyNeeds needs;
  for (const Step& step : request.steps) {
    for (const Piece& piece : step.pieces) {
      const Source& source = *piece.source;
      needs.staging = needs.staging || copy_path(source, device) == CopyPath::staged;
      needs.converting = needs.converting || (source.converted() && !converted_by_readers(source, device));
    }
  }
  return needs;
}

std::vector<CopyBatch> plan_copies(const CopyRequest& request, DeviceAbilities device, StagingRing* ring,
                                   const std::shared_ptr<Reads>& reads) {
  std::vector<CopyBatch> batches;
  for (const Step& step : request.steps) {
    CopyBatch direct{step.after, std::nullopt, {}};
    for (const Piece& piece : step.pieces) {
      const CopyPath path = copy_path(*piece.source, device);
      if (piece.count == 0 || path == CopyPath::staged) continue;
      const Source& source = *piece.source;
      Landing& landing = direct.landings.emplace_back();
      landing.piece = piece;
      landing.from = in_reach(source, source.stored_range(piece.first, piece.count));
      landing.convert = path == CopyPath::convert_after;
      if (!source.coding) continue;
      landing.index = in_reach(
          source, range_of_index(source, piece.first, piece.count));  // the coded tensor begins with it
    }
    batches.push_back(std::move(direct));
    Chunks chunks(ring, reads, device, batches);
    for (const Piece& piece : step.pieces) {
      if (piece.count > 0 && copy_path(*piece.source, device) == CopyPath::staged) chunks.add(piece);
    }
    chunks.finish();
  }
  return batches;
}

}  // namespace dynswap
