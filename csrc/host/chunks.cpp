#include "host/chunks.h"

#include <algorithm>

#include "core/align.h"
#include "io/aligned_buffer.h"

namespace dynswap {

namespace {

/// How many of `piece`'s first elements go into a chunk that has room for `room` stored bytes.
std::uint64_t elements_that_fit(const Piece& piece, std::size_t room) {
  const Source& source = *piece.source;
  const std::uint64_t fit = source.elements_within(piece.first, room);
  if (fit >= piece.count) return piece.count;
  if (source.coding) return fit;
  std::uint64_t count = fit;
  const std::size_t element = scalar_size(source.stored);
  const std::uint64_t begin = source.offset + piece.first * element;
  const std::uint64_t block_end = align_down(begin + count * element, kDirectAlign);
  if (source.file && begin % element == 0 && block_end > begin) count = (block_end - begin) / element;
  return count;
}

}  // namespace

std::vector<Chunk> cut_into_chunks(const std::vector<Piece>& pieces) {
  std::vector<Chunk> chunks;
  std::size_t room = 0;  // in the last chunk
  for (Piece rest : pieces) {
    const Source& source = *rest.source;
    while (rest.count > 0) {
      // A large piece begins a chunk of its own rather than fill up another one with a scrap.
      if (chunks.empty() || (stored_bytes(rest) > room && room < kChunkBytes)) {
        chunks.emplace_back();
        room = kChunkBytes;
      }
      Piece part = rest;
      part.count = elements_that_fit(rest, room);
      chunks.back().push_back(part);
      room -= stored_bytes(part);
      rest.first += part.count;
      rest.count -= part.count;
      rest.dst += part.count * scalar_size(source.wanted);
    }
  }
  return chunks;
}

}  // namespace dynswap
