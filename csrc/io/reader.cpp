#include "io/reader.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>

#include "core/check.h"
#include "io/aligned_buffer.h"
#include "io/file.h"
#include "io/private_pages.h"
#include "lossless/code.h"
#include "platform/mapped_memory.h"
#include "platform/mappings.h"

namespace dynswap {

namespace {

/// What is read at one time before it is cast: long enough for the disk, short enough to be still in the
/// core's cache when it is cast.
constexpr std::size_t kScratchBytes = 1u << 20;

/// Brings stored bytes of `source`, from `begin` on, to `dst`.
void fetch(const Source& source, std::uint64_t begin, std::byte* dst, std::size_t bytes, ReadMode mode) {
  if (!source.file) {
    fetch_from_memory(source, begin, dst, bytes);
    return;
  }
  const auto read = [&](std::size_t from, std::size_t to) {
    if (from < to) {
      source.file->read(source.offset + begin + from, dst + from, to - from, source.name, source.keep, mode);
    }
  };
  std::size_t done = 0;
  if (source.address != nullptr) {
    const std::byte* const mapping = source.address + begin;
    for (const ByteRange& range : private_ranges(mapping, bytes)) {
      // If they are gone by now, the file is shorter: reading it says so.
      if (!read_mapped(mapping + range.begin, dst + range.begin, range.end - range.begin)) continue;
      read(done, range.begin);
      done = range.end;
    }
  }
  read(done, bytes);
}

void cast_in_runs(const Source& source, std::byte* dst, const std::byte* src, std::size_t count,
                  CastFn cast) {
  for (std::size_t done = 0; done < count; done += kCastRun) {
    cast(dst + done * scalar_size(source.wanted), source.wanted, src + done * scalar_size(source.stored),
         source.stored, std::min(kCastRun, count - done));
  }
}

/// Between two ranges, so many bytes are read with them and dropped: fewer than a request of its own costs.
constexpr std::uint64_t kMostBetween = 16u << 10;

AlignedBuffer& scratch() {
  thread_local AlignedBuffer buffer(kScratchBytes + kDirectAlign);
  return buffer;
}

std::uint64_t file_offset(const Piece& piece) noexcept {
  return piece.source->offset + piece.source->stored_range(piece.first, piece.count).begin;
}

/// The path of the file that has a source's bytes; empty if there is none.
std::string path_of(const Source& source) {
  if (source.file) return source.file->path();
  if (!source.mapped) return {};
  const Mappings mappings = Mappings::of_this_process();
  const std::string* const path = mappings.file_at(source.address);
  return path == nullptr ? std::string() : *path;
}

/// Where blocks are decoded before they are cast. It stays in the core's cache.
std::byte* decoded_run() {
  thread_local AlignedBuffer buffer(kCastRun * sizeof(float));
  return buffer.data();
}

/// Decodes a piece from its bytes, which `coded` points to, and casts it where the source asks for it:
/// several blocks at a time, as a call of `cast` takes as long as some thousand elements.
void decode(const Piece& piece, std::byte* dst, const std::byte* coded, CastFn cast) {
  const Source& source = *piece.source;
  const Coding& coding = *source.coding;
  std::uint64_t first = source.coded_first + piece.first;
  const std::uint64_t end = first + piece.count;
  const std::uint64_t origin = coding.blocks[first / coding.block_weights];
  std::byte* const run = source.cast() ? decoded_run() : nullptr;
  std::byte* target = source.cast() ? run : dst;
  std::size_t held = 0;  // elements in `run`
  while (first < end) {
    const std::uint64_t block = first / coding.block_weights, begin = block * coding.block_weights;
    const std::uint64_t weights = std::min<std::uint64_t>(coding.block_weights, coding.weights - begin);
    const std::uint64_t count = std::min(end, begin + weights) - first;
    if (!lossless::decode_block(source.stored, coded + (coding.blocks[block] - origin),
                                coding.blocks[block + 1] - coding.blocks[block], weights, first - begin,
                                count, target)) {
      const std::string path = path_of(source);
      throw SourceError("weight '" + source.name + "' cannot be read: block " + std::to_string(block) +
                        " of its coded bytes is damaged" +
                        (path.empty() ? path : "; get a complete copy of '" + path + "'"));
    }
    target += count * scalar_size(source.stored);
    first += count;
    if (run == nullptr) continue;
    held += count;
    if (first < end && held + lossless::kBlockWeights <= kCastRun) continue;
    cast(dst, source.wanted, run, source.stored, held);
    dst += held * scalar_size(source.wanted);
    target = run;
    held = 0;
  }
}

/// Neighbouring ranges of one file. See Note [Neighbours are read together].
class Run {
 public:
  explicit Run(const PieceRead& first)
      : source_(*first.piece->source),
        dst_(first.dst),
        begin_(file_offset(*first.piece)),
        end_(begin_ + stored_bytes(*first.piece)),
        in_place_(!source_.converted()),
        through_scratch_(may_go_through_scratch(*first.piece)) {}

  bool take(const PieceRead& next) {
    const Piece& piece = *next.piece;
    const Source& source = *piece.source;
    const std::uint64_t begin = file_offset(piece);
    if (!source_.file || source.file != source_.file || source.keep != source_.keep || begin < end_ ||
        begin - end_ > kMostBetween || mapped_at(source) != mapped_at(source_))
      return false;
    const std::uint64_t end = begin + stored_bytes(piece);
    const bool in_place =
        in_place_ && !source.converted() && begin == end_ && next.dst == dst_ + (begin - begin_);
    const bool through_scratch =
        through_scratch_ && may_go_through_scratch(piece) && end - begin_ <= kScratchBytes;
    if (!in_place && !through_scratch) return false;
    in_place_ = in_place;
    through_scratch_ = through_scratch;
    end_ = end;
    return true;
  }

  /// False, and nothing counts as written, if the pieces have to be read one by one: some of their mapping
  /// has been written to, or the file cannot be read, of which the error is to name the weight.
  bool read(std::span<const PieceRead> reads, CastFn cast, ReadMode mode) const {
    const std::size_t bytes = end_ - begin_;
    if (source_.address != nullptr &&
        !private_ranges(source_.address + (begin_ - source_.offset), bytes).empty())
      return false;
    std::byte* const target = in_place_ ? dst_ : scratch().data() + begin_ % kDirectAlign;
    try {
      source_.file->read(begin_, target, bytes, source_.name, source_.keep, mode);
    } catch (const SourceError&) {
      return false;
    }
    if (in_place_) return true;
    for (const auto& [piece, dst] : reads) {
      const std::byte* const stored = target + (file_offset(*piece) - begin_);
      if (piece->source->coding) {
        decode(*piece, dst, stored, cast);
      } else if (piece->source->cast()) {
        cast_in_runs(*piece->source, dst, stored, piece->count, cast);
      } else {
        std::memcpy(dst, stored, stored_bytes(*piece));
      }
    }
    return true;
  }

 private:
  /// A large piece that is not cast would be copied once more than if it were read alone. Elements are never
  /// cast from a misaligned address.
  static bool may_go_through_scratch(const Piece& piece) noexcept {
    const std::size_t bytes = stored_bytes(piece);
    if (!piece.source->converted()) return bytes < kSmallRead;
    if (piece.source->coding) return bytes <= kScratchBytes;
    return bytes <= kScratchBytes && piece.source->offset % scalar_size(piece.source->stored) == 0;
  }

  /// Where the file's first byte would be mapped; 0 without a mapping.
  static std::uintptr_t mapped_at(const Source& source) noexcept {
    return source.address == nullptr ? 0 : reinterpret_cast<std::uintptr_t>(source.address) - source.offset;
  }

  const Source& source_;  ///< of the first piece
  std::byte* const dst_;  ///< of the first piece
  const std::uint64_t begin_;
  std::uint64_t end_;
  bool in_place_;  ///< ranges and destinations join
  bool through_scratch_;
};

}  // namespace

void fetch_from_memory(const Source& source, std::uint64_t begin, std::byte* dst, std::size_t bytes) {
  if (!source.mapped) {
    std::memcpy(dst, source.address + begin, bytes);
  } else if (!read_mapped(source.address + begin, dst, bytes)) {
    throw SourceError(gone(source.name, source.address));
  }
}

std::string gone(const std::string& who, const void* address) {
  const Mappings mappings = Mappings::of_this_process();
  const std::string* const path = mappings.file_at(address);
  return "weight '" + who + "' cannot be read: the file that its memory is mapped from" +
         (path == nullptr ? std::string() : ", '" + *path + "',") +
         " has been truncated since it was mapped, and ends before the weight does; get a complete copy of "
         "the "
         "file and load it again";
}

namespace {

void read_coded(const Piece& piece, std::byte* dst, CastFn cast, ReadMode mode) {
  const Source& source = *piece.source;
  for (Piece rest = piece; rest.count > 0;) {
    Piece part = rest;
    part.count = std::min(rest.count, source.elements_within(rest.first, kScratchBytes));
    const StoredRange range = source.stored_range(part.first, part.count);
    const std::byte* coded = nullptr;
    if (!source.file && !source.mapped) {
      coded = source.address + range.begin;
    } else {
      std::byte* const stored = scratch().data() + (source.offset + range.begin) % kDirectAlign;
      fetch(source, range.begin, stored, range.bytes(), mode);
      coded = stored;
    }
    decode(part, dst, coded, cast);
    rest.first += part.count;
    rest.count -= part.count;
    dst += part.count * scalar_size(source.wanted);
  }
}

}  // namespace

void read_piece(const Piece& piece, std::byte* dst, CastFn cast, ReadMode mode) {
  const Source& source = *piece.source;
  const std::size_t element = scalar_size(source.stored);
  if (!source.converted()) {
    fetch(source, piece.first * element, dst, piece.count * element, mode);
    return;
  }
  DYNSWAP_CHECK(!source.cast() || cast != nullptr,
                "weight '" << source.name << "' needs a cast, and there is no function for it");
  if (source.coding) return read_coded(piece, dst, cast, mode);
  if (!source.file && !source.mapped && reinterpret_cast<std::uintptr_t>(source.address) % element == 0) {
    cast_in_runs(source, dst, source.address + piece.first * element, piece.count, cast);
    return;
  }
  // In phase with the file, so that the disk writes straight into it; but never a misaligned element.
  const std::size_t phase = source.offset % element == 0 ? source.offset % kDirectAlign : 0;
  const std::size_t most = kScratchBytes / element;
  for (std::uint64_t done = 0; done < piece.count; done += most) {
    const std::size_t count = std::min<std::uint64_t>(most, piece.count - done);
    const std::uint64_t begin = (piece.first + done) * element;
    std::byte* const stored = scratch().data() + (phase + begin) % kDirectAlign;
    fetch(source, begin, stored, count * element, mode);
    cast_in_runs(source, dst + done * scalar_size(source.wanted), stored, count, cast);
  }
}

void read_pieces(std::vector<PieceRead>& reads, CastFn cast, ReadMode mode) {
  std::sort(reads.begin(), reads.end(), [](const PieceRead& a, const PieceRead& b) {
    const File* const file = a.piece->source->file.get();
    const File* const other = b.piece->source->file.get();
    if (file != other) return std::less<>()(file, other);
    return file_offset(*a.piece) < file_offset(*b.piece);
  });
  for (std::size_t first = 0, end = 0; first < reads.size(); first = end) {
    Run run(reads[first]);
    for (end = first + 1; end < reads.size() && run.take(reads[end]);) ++end;
    const std::span<const PieceRead> neighbours(&reads[first], end - first);
    if (neighbours.size() > 1 && run.read(neighbours, cast, mode)) continue;
    for (const auto& [piece, dst] : neighbours) read_piece(*piece, dst, cast, mode);
  }
}

}  // namespace dynswap
