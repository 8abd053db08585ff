#include "io/page_cache.h"

namespace dynswap {

Admission::Admission(std::uint64_t file_bytes)
    : read_before_(file_bytes / kBlockBytes / 64 + 1), charged_(read_before_.size()) {}

bool Admission::marked(Blocks& blocks, std::uint64_t offset) noexcept {
  const std::uint64_t block = offset / kBlockBytes;
  const std::uint64_t bit = std::uint64_t{1} << block % 64;
  return (blocks[block / 64].fetch_or(bit, std::memory_order_relaxed) & bit) != 0;
}

bool Admission::admit(std::uint64_t offset, std::size_t bytes) noexcept {
  if (!marked(read_before_, offset)) return false;
  const bool pays = !direct_.known() || !through_cache_.known() ||
                    through_cache_.ns_per_byte() <= (1 + kPayback) * direct_.ns_per_byte();
  if (!pays) return false;
  // Two readers of one range may both take it: that is counted twice, and never too little.
  const std::uint64_t block = offset / kBlockBytes;
  if ((charged_[block / 64] >> block % 64 & 1) != 0) return true;
  if (!charge_.grow(bytes)) return false;
  marked(charged_, offset);
  return true;
}

void Admission::took(bool through_cache, std::size_t bytes, std::chrono::nanoseconds time) noexcept {
  Speed& speed = through_cache ? through_cache_ : direct_;
  speed.nanoseconds += static_cast<std::uint64_t>(time.count());
  speed.bytes += bytes;
}

}  // namespace dynswap
