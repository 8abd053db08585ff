#include "accelerator/copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "accelerator/decode.h"
#include "accelerator/scalars.h"

namespace dynswap {
namespace {

constexpr std::size_t kScratchBytes = 16u << 20;
constexpr std::size_t kLeastScratchBytes = 1u << 18;
/// Coded bytes that are decoded at once: some 0.7 million weights of two bytes, which take 30 MB meanwhile.
constexpr std::size_t kDecodedBytes = 1u << 20;

}  // namespace

at::Tensor CopyStream::on_device(std::byte* data, std::uint64_t count, Scalar type) const {
  return at::for_blob(data, {static_cast<std::int64_t>(count)})
      .target_device(device_)
      .options(at::TensorOptions().dtype(torch_type(type)).device(device_))
      .make_tensor();
}

void CopyStream::copy_bytes(const at::Tensor& to, const std::byte* from) const {
  const at::Tensor host =
      at::from_blob(const_cast<std::byte*>(from), to.sizes(), at::TensorOptions(to.dtype()));
  to.copy_(host, non_blocking_);
}

void CopyStream::enqueue(const Landing& landing) const {
  if (landing.convert) return landing.piece.source->coding ? copy_decoded(landing) : copy_cast(landing);
  const Piece& piece = landing.piece;
  // As bytes: a copy between equal types changes no byte, whatever the type.
  const std::uint64_t bytes = piece.count * scalar_size(piece.source->wanted);
  copy_bytes(on_device(piece.dst, bytes, Scalar::raw8), landing.from);
}

/// The stored bytes land in a scratch block first. torch allocates and frees it in the order of the copy
/// stream, so the next cast may get the same block. It is not part of the budget. Where memory is short a
/// smaller block is used, and the cast takes more rounds.
void CopyStream::copy_cast(const Landing& landing) const {
  const Piece& piece = landing.piece;
  const Source& source = *piece.source;
  const std::size_t size = scalar_size(source.stored);
  std::uint64_t most = std::min<std::uint64_t>(piece.count, kScratchBytes / size);
  at::Tensor scratch;
  while (!scratch.defined()) {
    try {
      scratch = at::empty({static_cast<std::int64_t>(most)},
                          at::TensorOptions().dtype(torch_type(source.stored)).device(device_));
    } catch (const c10::OutOfMemoryError&) {
      if (most * size <= kLeastScratchBytes) throw;
      most /= 2;
    }
  }
  for (std::uint64_t done = 0; done < piece.count;) {
    const std::uint64_t count = std::min<std::uint64_t>(piece.count - done, most);
    const at::Tensor stored = scratch.narrow(0, 0, static_cast<std::int64_t>(count));
    copy_bytes(stored, landing.from + done * size);
    on_device(piece.dst + done * scalar_size(source.wanted), count, source.wanted).copy_(stored, true);
    done += count;
  }
}

/// Coded blocks land in memory that torch allocates and frees in the order of the copy stream, as for a cast.
void CopyStream::copy_decoded(const Landing& landing) const {
  const Piece& piece = landing.piece;
  const Source& source = *piece.source;
  const std::uint64_t before = source.stored_range(piece.first, piece.count).begin;
  const std::uint64_t first_block = source.blocks(piece.first, piece.count).first;
  const auto bytes_on_device = [&](const std::byte* from, std::uint64_t bytes) {
    const auto size = static_cast<std::int64_t>(bytes);
    const at::Tensor made = at::empty({size}, at::TensorOptions().dtype(at::kByte).device(device_));
    copy_bytes(made, from);
    return made;
  };
  for (std::uint64_t done = 0; done < piece.count;) {
    const std::uint64_t first = piece.first + done;
    const std::uint64_t count = std::min(piece.count - done, source.elements_within(first, kDecodedBytes));
    const auto [block, blocks] = source.blocks(first, count);
    const StoredRange range = source.stored_range(first, count);
    constexpr std::size_t kEntry = sizeof(std::uint64_t);
    const std::uint64_t begin = block * source.coding->block_weights;
    const std::uint64_t weights =
        std::min(source.coding->weights - begin, blocks * source.coding->block_weights);
    const at::Tensor values =
        decoded({bytes_on_device(landing.from + (range.begin - before), range.bytes()),
                 bytes_on_device(landing.index + (block - first_block) * kEntry, (blocks + 1) * kEntry),
                 static_cast<std::int64_t>(weights)},
                source.stored);
    on_device(piece.dst + done * scalar_size(source.wanted), count, source.wanted)
        .copy_(values.narrow(0, static_cast<std::int64_t>(source.coded_first + first - begin),
                             static_cast<std::int64_t>(count)),
               true);
    done += count;
  }
}

}  // namespace dynswap
