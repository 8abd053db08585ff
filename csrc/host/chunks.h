// Cuts what one step copies into tasks of a size that keeps disk and threads busy.
#pragma once

#include <cstddef>
#include <vector>

#include "core/backend.h"

namespace dynswap {

/// Pieces that one worker brings in one go.
using Chunk = std::vector<Piece>;

/// Stored bytes of a chunk, at most. From benchmarks/cpp/host_read.cpp, four threads on a virtual disk: read
/// in place, 1 to 8 MiB are alike; through bounce buffers, 1 and 2 MiB are quicker than 4 and 8, since
/// more threads are at work at the end of a group.
inline constexpr std::size_t kChunkBytes = 2u << 20;

/// Cuts large pieces, and puts small ones together. The order of the bytes stays. Pieces of a file are cut
/// where the file's blocks end, so that no block is read twice.
std::vector<Chunk> cut_into_chunks(const std::vector<Piece>& pieces);

}  // namespace dynswap
