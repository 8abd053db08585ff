#include "accelerator/copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "accelerator/scalars.h"

namespace dynswap {
namespace {

constexpr std::size_t kScratchBytes = 16u << 20;
constexpr std::size_t kLeastScratchBytes = 1u << 18;

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
  if (landing.convert) return copy_cast(landing);
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

}  // namespace dynswap
