// How a request reaches an accelerator: the path of each piece, and the chunks of the pieces that are staged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/backend.h"
#include "transfer/staging.h"

namespace dynswap {

/// Note [Where a weight is cast]
///   - Pinned: it crosses the bus as it is stored, and the device casts it. This costs neither RAM nor CPU
///     time.
///   - Staged and widened (or as wide): likewise; the bus carries the smaller type.
///   - Staged and narrowed: the readers cast it, since they touch each byte anyway; the bus carries the
///     smaller type.
///   - Into f8_e4m3fn: always by the readers, through torch's own conversion, because torch's releases
///     differ in what they make of values that are too large (NaN, or the largest). So even a pinned
///     source is staged then.
///   - Coded (docs/lossless.md): as if the device cast, from the coded type: it crosses the bus coded. A
///     kernel of ours decodes and casts it there, or torch's operations. Where it lacks these, the readers
///     do.
///   - On a device that cannot cast (one that CUDA kernels were not compiled for): always by the readers.
enum class CopyPath {
  direct,         ///< pinned, not cast: straight into place
  convert_after,  ///< pinned: to a scratch block, then cast or decoded into place
  staged,         ///< read into a pinned buffer first, and from there one of the two
};

/// Whether a device that can cast at all can cast into `wanted`: any floating type but f8_e4m3fn.
constexpr bool device_casts_to(Scalar wanted) noexcept {
  return is_floating(wanted) && wanted != Scalar::f8_e4m3fn;
}

/// What a device can do itself with what it is sent.
struct DeviceAbilities {
  bool casts = true;
  bool decodes = false;  ///< coded bytes, and casts on the way
};

/// Whether readers convert the source (decode it, cast it), and not the device.
bool converted_by_readers(const Source& source, DeviceAbilities device) noexcept;
CopyPath copy_path(const Source& source, DeviceAbilities device) noexcept;

/// Brings the page-locked copies of large masters up to date, or has the masters staged: Note [A large master
/// has a page-locked copy]. Called once for a request, before the functions below.
void refresh_pinned_copies(CopyRequest& request);

/// What a request needs: a staging ring, and casts on the device.
struct CopyNeeds {
  bool staging = false;
  bool converting = false;  ///< by the device
};
CopyNeeds needs_of(const CopyRequest& request, DeviceAbilities device) noexcept;

/// The last leg of a piece: the device copies it from memory that it reads into place or, with `convert`,
/// into a scratch block, and casts it from there, or decodes it.
struct Landing {
  Piece piece;                      ///< as requested
  const std::byte* from = nullptr;  ///< its bytes: as they are stored if `convert`, else as they are wanted
  bool convert = false;
  const std::byte* index = nullptr;  ///< coded: Coding::blocks from the piece's first block on, unaligned
};

/// What is enqueued on the copy stream together: first the waits for `after`, then, for a staged chunk, the
/// wait for its read, then the landings.
struct CopyBatch {
  std::vector<EventPtr> after;
  std::optional<std::uint64_t> chunk;  ///< of the ring
  std::vector<Landing> landings;
};

/// Splits a request into batches, in the order in which they are to be enqueued. Queues the reads of what is
/// staged, which `reads` counts. `ring` and `reads` may be null where nothing is staged. Brings the pinned
/// copies of small masters up to date.
///
/// The caller has to enqueue chunks in the order in which they were added: see StagingRing.
std::vector<CopyBatch> plan_copies(const CopyRequest& request, DeviceAbilities device, StagingRing* ring,
                                   const std::shared_ptr<Reads>& reads);

}  // namespace dynswap
