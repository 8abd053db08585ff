// Brings a piece of a source into RAM, wherever it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/scalar.h"
#include "io/read_policy.h"

namespace dynswap {

/// Elements that one call of a CastFn is given at most: large enough to be quick, small enough to stay in
/// the core's cache, and to be no work that a cast would split among threads.
inline constexpr std::size_t kCastRun = 32768;

/// Copies stored bytes of a source without a file from its memory. Throws SourceError if that is gone.
void fetch_from_memory(const Source& source, std::uint64_t begin, std::byte* dst, std::size_t bytes);

/// The error for mapped memory that is gone (Note [A mapping outlives its file's end]).
std::string gone(const std::string& who, const void* address);

/// Writes the elements of `piece` to `dst` in RAM (`piece.dst` is ignored), cast where the source asks for
/// it. Runs on the calling thread and blocks it. Throws SourceError.
///
/// `pace` is for what the page cache has (io/read_policy.h).
///
/// A file source is read from its file, except the pages of its mapping that this process has written
/// to: there the mapping is the truth (Invariant 6, see io/private_pages.h).
void read_piece(const Piece& piece, std::byte* dst, CastFn cast, ReadMode mode);

/// A piece, and where read_piece() is to write it. The piece outlives the read.
struct PieceRead {
  const Piece* piece = nullptr;
  std::byte* dst = nullptr;
};

/// Reads pieces, in any order, each as read_piece() does; reorders `reads`.
///
/// Note [Neighbours are read together]: a request to the disk, or to the page cache, costs as much as some
/// ten kilobytes, and a model of small layers has hundreds of small weights, one after the other in its file.
/// So ranges of one file that follow one another closely are one request. It goes straight into place if
/// ranges and destinations both join (the engine lays out a group in the order of its file), else through a
/// scratch block: between two destinations there may be one that is read from elsewhere.
void read_pieces(std::vector<PieceRead>& reads, CastFn cast, ReadMode mode);

}  // namespace dynswap
