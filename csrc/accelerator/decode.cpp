#include "accelerator/decode.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <vector>

#include "accelerator/plain_torch.h"
#include "accelerator/scalars.h"
#include "lossless/code.h"

namespace dynswap {

namespace {

constexpr auto kUnit = static_cast<std::int64_t>(lossless::kAlignment);
constexpr auto kHeader = static_cast<std::int64_t>(lossless::kHeaderBytes);

std::int64_t signed_of(std::size_t value) { return static_cast<std::int64_t>(value); }

/// The numbers from 0 on, made on the device: a copy from the host would be waited for.
at::Tensor numbers(std::int64_t count, const at::Tensor& like, at::ScalarType type = at::kLong) {
  return at::arange(count, like.options().dtype(type));
}

/// The first `bytes` of each block, uint8 (blocks, bytes). Past the end, the last unit is repeated.
at::Tensor first_bytes(const at::Tensor& units, const at::Tensor& begins, std::int64_t bytes) {
  const std::int64_t of_block = (bytes + kUnit - 1) / kUnit;
  const at::Tensor places = (begins.unsqueeze(1) + numbers(of_block, units)).clamp(0, units.size(0) - 1);
  return units.index_select(0, places.flatten()).view({begins.size(0), of_block * kUnit}).narrow(1, 0, bytes);
}

/// The numbers whose three bits are in planes, uint8 (blocks, weights).
at::Tensor of_planes(const at::Tensor& content, std::size_t begin, std::size_t plane) {
  const at::Tensor planes = content.narrow(1, signed_of(begin), signed_of(3 * plane));
  const at::Tensor bits = planes.reshape({planes.size(0), 3, signed_of(plane), 1})
                              .bitwise_right_shift(numbers(8, content, at::kByte))
                              .bitwise_and(1);
  return (bits.select(1, 0) | bits.select(1, 1).bitwise_left_shift(1) |
          bits.select(1, 2).bitwise_left_shift(2))
      .flatten(1);
}

at::Tensor as_type(const at::Tensor& bytes, at::ScalarType type) { return bytes.contiguous().view(type); }

/// The weights of blocks that have `weights` each, as integers of their size: (blocks, weights).
at::Tensor of_equal_blocks(const at::Tensor& bytes, const at::Tensor& begins, Scalar type,
                           std::size_t weights) {
  const lossless::Parts parts = lossless::parts_of(type, weights);
  const std::size_t padded = align_up(weights, lossless::kRunWeights);
  const std::size_t size = scalar_size(type);
  const at::ScalarType integer = size == 2 ? at::kShort : at::kInt;
  const at::Tensor units = bytes.view({-1, kUnit});
  const at::Tensor content = first_bytes(units, begins, signed_of(parts.escapes));

  const at::Tensor codes = of_planes(content, parts.planes, parts.plane);
  const at::Tensor escaped = codes.eq(lossless::kEscape);
  const at::Tensor table = content.narrow(1, 1, signed_of(lossless::kCodes));  // the last is no exponent
  const at::Tensor places = (escaped.cumsum(1, at::kInt) +
                             (begins * kUnit + signed_of(parts.escapes) - 1).to(at::kInt).unsqueeze(1))
                                .clamp(0, bytes.size(0) - 1);
  const at::Tensor listed = bytes.index_select(0, places.flatten()).view_as(codes);
  const at::Tensor exponents = at::where(escaped, listed, table.gather(1, codes.to(at::kLong))).to(at::kInt);
  const at::Tensor mantissas = content.narrow(1, signed_of(parts.bytes), signed_of(padded)).to(at::kInt);

  at::Tensor top = mantissas.bitwise_and(0x80).bitwise_left_shift(8);
  if (type == Scalar::f16) {
    top = top | exponents.bitwise_left_shift(10) | mantissas.bitwise_and(0x7F).bitwise_left_shift(3) |
          of_planes(content, parts.low_planes, parts.plane).to(at::kInt);
  } else {
    top = top | exponents.bitwise_left_shift(7) | mantissas.bitwise_and(0x7F);
  }
  at::Tensor coded = top.to(at::kShort);
  if (size == 4) {
    const at::Tensor low = content.narrow(1, signed_of(parts.low), signed_of(2 * padded));
    coded = at::stack({as_type(low, at::kShort), coded}, 2).flatten(1).view(at::kInt);
  }
  const at::Tensor raw = first_bytes(units, begins, kHeader + signed_of(weights * size));
  const at::Tensor stored = as_type(raw.narrow(1, kHeader, signed_of(weights * size)), integer);
  const at::Tensor is_raw = content.narrow(1, 0, 1).eq(static_cast<int>(lossless::Kind::raw));
  return at::where(is_raw, stored, coded.narrow(1, 0, signed_of(weights)));
}

}  // namespace

at::Tensor decoded(const BlocksOnDevice& blocks, Scalar type) {
  const at::Tensor index = blocks.index.view(at::kLong);
  const at::Tensor begins = (index - index.select(0, 0)).floor_divide(kUnit);
  const auto of_block = signed_of(lossless::kBlockWeights);
  const std::int64_t whole = blocks.weights / of_block, rest = blocks.weights % of_block;
  std::vector<at::Tensor> values;
  if (whole > 0) {
    values.push_back(
        of_equal_blocks(blocks.bytes, begins.narrow(0, 0, whole), type, lossless::kBlockWeights).flatten());
  }
  if (rest > 0) {
    values.push_back(
        of_equal_blocks(blocks.bytes, begins.narrow(0, whole, 1), type, static_cast<std::size_t>(rest))
            .flatten());
  }
  return (values.size() == 1 ? values.front() : at::cat(values)).view(torch_type(type));
}

bool decodes(const c10::Device& device) noexcept {
  try {
    const PlainTorch guard;
    constexpr std::size_t kWeights = 300;  // two runs
    for (const Scalar type : {Scalar::bf16, Scalar::f32, Scalar::f16}) {
      const std::size_t size = scalar_size(type);
      at::Tensor weights = at::empty({signed_of(kWeights * size)}, at::kByte);
      auto* const given = weights.mutable_data_ptr<std::uint8_t>();
      // Exponents that differ little, and some that are escapes.
      for (std::size_t i = 0; i < kWeights * size; ++i)
        given[i] =
            static_cast<std::uint8_t>(i % size == size - 1 ? 0x3C + (i % 7 == 0 ? i % 60 : 0) : i * 37);
      at::Tensor coded = at::empty({signed_of(lossless::most_block_bytes(type))}, at::kByte);
      auto* const block = reinterpret_cast<std::byte*>(coded.mutable_data_ptr<std::uint8_t>());
      const std::size_t bytes = lossless::encode_block(type, given, kWeights, block);
      const std::array<std::uint64_t, 2> ends{0, bytes};
      at::Tensor index = at::empty({sizeof(ends)}, at::kByte);
      std::memcpy(index.mutable_data_ptr(), ends.data(), sizeof(ends));
      const at::Tensor values = decoded(
          {coded.narrow(0, 0, signed_of(bytes)).to(device), index.to(device), signed_of(kWeights)}, type);
      if (!values.view(at::kByte).cpu().equal(weights)) return false;
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace dynswap
