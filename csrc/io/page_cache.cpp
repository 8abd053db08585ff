#include "io/page_cache.h"

namespace dynswap {

Admission::Admission(std::uint64_t file_bytes) : read_before_(file_bytes / kBlockBytes / 64 + 1) {}

bool Admission::admit(std::uint64_t offset) noexcept {
  const std::uint64_t block = offset / kBlockBytes;
  const std::uint64_t bit = std::uint64_t{1} << block % 64;
  if ((read_before_[block / 64].fetch_or(bit, std::memory_order_relaxed) & bit) == 0) return false;
  if (!direct_.known() || !through_cache_.known()) return true;
  return through_cache_.ns_per_byte() <= (1 + kPayback) * direct_.ns_per_byte();
}

void Admission::took(bool through_cache, std::size_t bytes, std::chrono::nanoseconds time) noexcept {
  Speed& speed = through_cache ? through_cache_ : direct_;
  speed.nanoseconds += static_cast<std::uint64_t>(time.count());
  speed.bytes += bytes;
}

}  // namespace dynswap
