#include "io/page_cache.h"

#include <algorithm>
#include <mutex>

namespace dynswap {

Admission::Admission(std::uint64_t file_bytes)
    : file_bytes_(file_bytes),
      read_before_(file_bytes / kBlockBytes / 64 + 1),
      charged_(read_before_.size()) {}

bool Admission::is_marked(const Blocks& blocks, std::uint64_t block) noexcept {
  return (blocks[block / 64].load(std::memory_order_relaxed) >> block % 64 & 1) != 0;
}

bool Admission::mark(Blocks& blocks, std::uint64_t block) noexcept {
  const std::uint64_t bit = std::uint64_t{1} << block % 64;
  return (blocks[block / 64].fetch_or(bit, std::memory_order_relaxed) & bit) != 0;
}

bool Admission::admit(std::uint64_t offset, std::size_t bytes) noexcept {
  if (!mark(read_before_, offset / kBlockBytes)) return false;
  const bool pays = !direct_.known() || !through_cache_.known() ||
                    through_cache_.ns_per_byte() <= (1 + kPayback) * direct_.ns_per_byte();
  return pays && charge(offset, bytes);
}

bool Admission::charge(std::uint64_t offset, std::size_t bytes) noexcept {
  const std::uint64_t first = offset / kBlockBytes, end = (offset + bytes - 1) / kBlockBytes + 1;
  const auto uncharged = [&] {
    std::uint64_t found = 0;
    for (std::uint64_t block = first; block < end; ++block) {
      const std::uint64_t begin = std::min(block * kBlockBytes, file_bytes_);
      if (!is_marked(charged_, block)) found += std::min(file_bytes_ - begin, kBlockBytes);
    }
    return found;
  };
  if (uncharged() == 0) return true;
  const std::lock_guard lock(charging_);
  if (!charge_.grow(uncharged())) return false;
  for (std::uint64_t block = first; block < end; ++block) mark(charged_, block);
  return true;
}

void Admission::took(bool through_cache, std::size_t bytes, std::chrono::nanoseconds time) noexcept {
  Speed& speed = through_cache ? through_cache_ : direct_;
  speed.nanoseconds += static_cast<std::uint64_t>(time.count());
  speed.bytes += bytes;
}

}  // namespace dynswap
