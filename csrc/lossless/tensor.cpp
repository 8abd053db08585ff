#include "lossless/tensor.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>

#include "core/check.h"
#include "lossless/load.h"
#include "platform/process.h"

namespace dynswap::lossless {
namespace {

constexpr std::size_t kBlocksAtATime = 64;  ///< that a thread takes: half a MiB of bf16

/// Calls `work(first, last)` for parts of [0, blocks), on this thread and others. It must not throw.
void for_blocks(std::size_t blocks, int threads, const std::function<void(std::size_t, std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  const auto run = [&] {
    for (;;) {
      const std::size_t first = next.fetch_add(kBlocksAtATime);
      if (first >= blocks) return;
      work(first, std::min(first + kBlocksAtATime, blocks));
    }
  };
  const std::size_t parts = (blocks + kBlocksAtATime - 1) / kBlocksAtATime;
  const std::size_t most = std::min(parts, static_cast<std::size_t>(std::max(threads, 1)));
  std::vector<Thread> others;
  others.reserve(most);
  try {
    while (others.size() + 1 < most) others.push_back(start_thread("dynswap-encode", run));
  } catch (const std::exception&) {
    // there are no more threads to be had: it takes longer
  }
  run();
  for (Thread& thread : others) thread.join();
}

std::uint64_t offset_at(const std::byte* index, std::size_t block) noexcept {
  return load<std::uint64_t>(index + block * sizeof(std::uint64_t));
}

/// Whether a block can be where the index says.
bool sound(const std::byte* index, std::size_t block, std::size_t bytes, std::size_t weights,
           Scalar type) noexcept {
  const std::uint64_t begin = offset_at(index, block), end = offset_at(index, block + 1);
  return begin >= index_bytes(weights) && begin < end && end <= bytes && begin % kAlignment == 0 &&
         end % kAlignment == 0 && end - begin <= most_block_bytes(type);
}

std::string at_block(std::size_t block, std::size_t weights) {
  return "at block " + std::to_string(block) + " of " + std::to_string(blocks_of(weights));
}

}  // namespace

Encoder::Encoder(Scalar type, const void* src, std::size_t weights, int threads)
    : type_(type), src_(static_cast<const std::byte*>(src)), weights_(weights), threads_(threads) {
  DYNSWAP_CHECK(codable(type), "weights of this type are not coded");
  const std::size_t blocks = blocks_of(weights);
  plans_.resize(blocks);
  for_blocks(blocks, threads, [this](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      plans_[i] = plan_block(type_, src_ + i * kBlockWeights * scalar_size(type_), weights_in(i, weights_));
    }
  });
  offsets_.reserve(blocks + 1);
  offsets_.push_back(index_bytes(weights));
  for (std::size_t i = 0; i < blocks; ++i) {
    offsets_.push_back(offsets_.back() + block_bytes(type, plans_[i], weights_in(i, weights)));
  }
}

bool Encoder::pays() const noexcept {
  const std::size_t raw = weights_ * scalar_size(type_);
  return bytes() <= raw - (raw + 19) / 20;
}

void Encoder::write(std::byte* dst) const {
  const std::size_t index = offsets_.size() * sizeof(std::uint64_t);
  std::memcpy(dst, offsets_.data(), index);
  std::memset(dst + index, 0, index_bytes(weights_) - index);
  std::atomic<bool> written{true};
  for_blocks(plans_.size(), threads_, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      if (!write_block(type_, plans_[i], src_ + i * kBlockWeights * scalar_size(type_),
                       weights_in(i, weights_), dst + offsets_[i])) {
        written = false;
      }
    }
  });
  if (!written) throw Error("weights were changed while they were coded: write them when nothing else does");
}

std::string check_index(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights) {
  if (!codable(type)) return "weights of this type are not coded";
  const std::size_t blocks = blocks_of(weights);
  if (bytes < index_bytes(weights) || offset_at(src, 0) != index_bytes(weights) ||
      offset_at(src, blocks) != bytes) {
    return "its " + std::to_string(bytes) + " bytes are not those that its index has for " +
           std::to_string(weights) + " weights";
  }
  for (std::size_t i = 0; i < blocks; ++i) {
    if (!sound(src, i, bytes, weights, type)) return "its index is wrong " + at_block(i, weights);
  }
  return {};
}

std::string check_tensor(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights) {
  std::string wrong = check_index(type, src, bytes, weights);
  for (std::size_t i = 0; wrong.empty() && i < blocks_of(weights); ++i) {
    const std::uint64_t begin = offset_at(src, i);
    const char* const of_block =
        check_block(type, src + begin, offset_at(src, i + 1) - begin, weights_in(i, weights));
    if (of_block != nullptr) wrong = of_block + (" " + at_block(i, weights));
  }
  return wrong;
}

bool decode_tensor(Scalar type, const std::byte* src, std::size_t bytes, std::size_t weights,
                   std::size_t first, std::size_t count, void* dst) noexcept {
  if (!codable(type) || bytes < index_bytes(weights) || first > weights || count > weights - first) {
    return false;
  }
  auto* out = static_cast<std::byte*>(dst);
  for (const std::size_t end = first + count; first < end;) {
    const std::size_t block = first / kBlockWeights;
    const std::size_t skipped = first % kBlockWeights;
    const std::size_t in_block = weights_in(block, weights);
    const std::size_t taken = std::min(in_block - skipped, end - first);
    if (!sound(src, block, bytes, weights, type)) return false;
    const std::uint64_t begin = offset_at(src, block);
    if (!decode_block(type, src + begin, offset_at(src, block + 1) - begin, in_block, skipped, taken, out)) {
      return false;
    }
    out += taken * scalar_size(type);
    first += taken;
  }
  return true;
}

}  // namespace dynswap::lossless
