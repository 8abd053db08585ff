// Brings a piece of a source into RAM, wherever it is.
#pragma once

#include <cstddef>

#include "core/backend.h"
#include "core/scalar.h"
#include "io/haste.h"

namespace dynswap {

/// Elements that one call of a CastFn is given at most: large enough to be quick, small enough to stay in
/// the core's cache, and to be no work that a cast would split among threads.
inline constexpr std::size_t kCastRun = 32768;

/// Writes the elements of `piece` to `dst` in RAM (`piece.dst` is ignored), cast where the source asks for
/// it. Runs on the calling thread and blocks it. Throws SourceError.
///
/// `pace` is for what the page cache has (io/haste.h).
///
/// A file source is read from its file, except the pages of its mapping that this process has written
/// to: there the mapping is the truth (Invariant 6, see io/private_pages.h).
void read_piece(const Piece& piece, std::byte* dst, CastFn cast, Pace pace);

}  // namespace dynswap
