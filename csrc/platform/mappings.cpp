#include "platform/mappings.h"

#include <algorithm>
#include <iterator>

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

bool Mappings::holds_any(const void* address, std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const auto after =
      std::lower_bound(mappings_.begin(), mappings_.end(), begin + std::max<std::size_t>(bytes, 1),
                       [](const Mapping& m, std::uintptr_t a) { return m.begin < a; });
  return after != mappings_.begin() && std::prev(after)->end > begin;
}

std::vector<Mappings::Part> Mappings::parts_of(const void* address, std::size_t bytes) const {
  std::vector<Part> parts;
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t end = begin + bytes;
  for (std::uintptr_t at = begin; at < end;) {
    const auto next = std::upper_bound(mappings_.begin(), mappings_.end(), at,
                                       [](std::uintptr_t a, const Mapping& m) { return a < m.end; });
    const bool inside = next != mappings_.end() && next->begin <= at;
    std::uintptr_t until = end;
    if (next != mappings_.end()) until = std::min(end, inside ? next->end : next->begin);
    const void* const from = static_cast<const std::byte*>(address) + (at - begin);
    parts.push_back({until - at, inside, find(from, until - at)});
    at = until;
  }
  return parts;
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
