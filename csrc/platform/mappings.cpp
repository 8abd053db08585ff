#include "platform/mappings.h"

#include <algorithm>

namespace dynswap {

const Mappings::Mapping* Mappings::mapping_at(std::uintptr_t begin) const {
  auto after = std::upper_bound(mappings_.begin(), mappings_.end(), begin,
                                [](std::uintptr_t a, const Mapping& m) { return a < m.begin; });
  if (after == mappings_.begin()) return nullptr;
  const Mapping& mapping = *--after;
  return begin < mapping.end ? &mapping : nullptr;
}

const std::string* Mappings::file_at(const void* address) const {
  const Mapping* const mapping = mapping_at(reinterpret_cast<std::uintptr_t>(address));
  return mapping == nullptr ? nullptr : &mapping->file.path;
}

std::optional<Mappings::Range> Mappings::find(const void* address, std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const Mapping* const found = mapping_at(begin);
  if (found == nullptr || !found->is_source || begin + bytes > found->end) return std::nullopt;
  const Mapping& mapping = *found;
  Range range = mapping.file;
  range.offset += begin - mapping.begin;
  range.mapped_at = mapping.begin;
  return range;
}

}  // namespace dynswap
