#include "io/reader.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "io/aligned_buffer.h"
#include "io/file.h"
#include "io/private_pages.h"

namespace dynswap {

namespace {

/// What is read at one time before it is cast: long enough for the disk, short enough to be still in the
/// core's cache when it is cast.
constexpr std::size_t kScratchBytes = 1u << 20;

/// Brings stored bytes of `source`, from `begin` on, to `dst`.
void fetch(const Source& source, std::uint64_t begin, std::byte* dst, std::size_t bytes, Pace pace) {
  if (!source.file) {
    std::memcpy(dst, source.address + begin, bytes);
    return;
  }
  const auto read = [&](std::size_t from, std::size_t to) {
    if (from < to) {
      source.file->read(source.offset + begin + from, dst + from, to - from, source.name, source.keep, pace);
    }
  };
  std::size_t done = 0;
  if (source.address != nullptr) {
    const std::byte* const mapping = source.address + begin;
    for (const ByteRange& range : private_ranges(mapping, bytes)) {
      read(done, range.begin);
      std::memcpy(dst + range.begin, mapping + range.begin, range.end - range.begin);
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

}  // namespace

void read_piece(const Piece& piece, std::byte* dst, CastFn cast, Pace pace) {
  const Source& source = *piece.source;
  const std::size_t element = scalar_size(source.stored);
  if (!source.cast()) {
    fetch(source, piece.first * element, dst, piece.count * element, pace);
    return;
  }
  DYNSWAP_CHECK(cast != nullptr,
                "weight '" << source.name << "' needs a cast, and there is no function for it");
  if (!source.file && reinterpret_cast<std::uintptr_t>(source.address) % element == 0) {
    cast_in_runs(source, dst, source.address + piece.first * element, piece.count, cast);
    return;
  }
  thread_local const AlignedBuffer scratch(kScratchBytes + kDirectAlign);
  // In phase with the file, so that the disk writes straight into it; but never a misaligned element.
  const std::size_t phase = source.offset % element == 0 ? source.offset % kDirectAlign : 0;
  const std::size_t most = kScratchBytes / element;
  for (std::uint64_t done = 0; done < piece.count; done += most) {
    const std::size_t count = std::min<std::uint64_t>(most, piece.count - done);
    const std::uint64_t begin = (piece.first + done) * element;
    std::byte* const stored = scratch.data() + (phase + begin) % kDirectAlign;
    fetch(source, begin, stored, count * element, pace);
    cast_in_runs(source, dst + done * scalar_size(source.wanted), stored, count, cast);
  }
}

}  // namespace dynswap
