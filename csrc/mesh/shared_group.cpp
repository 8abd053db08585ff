#include "mesh/shared_group.h"

#include <utility>

namespace dynswap {

namespace {

/// Parts begin at multiples of this in a group; every element's size divides it.
constexpr std::size_t kAlignment = 512;
/// A part of fewer bytes is not worth a collective.
constexpr std::size_t kLeast = 4096;

/// The source as every rank has it: of a file, the bytes of the file and not those of this process's mapping.
SourcePtr as_all_have(const SourcePtr& source) {
  if (!source->from_files()) return source;
  auto made = std::make_shared<Source>(*source);
  if (made->file) made->address = nullptr;
  for (SourcePtr& part : made->parts) part = as_all_have(part);
  return made;
}

}  // namespace

std::uint64_t mixed(std::uint64_t value, std::uint64_t with) noexcept {
  value = (value ^ with) + 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

SharedPart shared_part_of(const WholeGroup& group,
                          const std::function<std::uint64_t(const Source&)>& identity) {
  std::vector<std::uint64_t> of_sources;
  SharedPart part{0, group.bytes};
  for (const WholeGroup::Part& weight : group.parts) {
    of_sources.push_back(identity(*weight.source));
    if (of_sources.back() == 0) part.bytes = std::min(part.bytes, weight.offset);
  }
  if (part.bytes == 0) return part;
  part.identity = part.bytes;
  for (std::size_t i = 0; i < group.parts.size(); ++i) {
    const WholeGroup::Part& weight = group.parts[i];
    if (weight.offset >= part.bytes) continue;
    part.identity = mixed(mixed(part.identity, of_sources[i]), weight.offset);
    part.identity = mixed(part.identity, static_cast<std::uint64_t>(weight.source->wanted));
  }
  if (part.identity == 0) part.identity = 1;
  return part;
}

SharedGroupPtr shared_group(const WholeGroup& group, const SharedPart& part, std::size_t rank,
                            std::size_t ranks) {
  auto made = std::make_shared<SharedGroup>();
  made->part = part.bytes / ranks / kAlignment * kAlignment;
  if (made->part < kLeast) made->part = 0;
  made->identity = part.identity;
  made->group = {group.group, nullptr, part.bytes, {}};
  for (const WholeGroup::Part& weight : group.parts) {
    if (weight.offset >= part.bytes) continue;
    made->all_bytes += weight.source->stored_bytes();
    made->group.parts.push_back({as_all_have(weight.source), weight.offset});
  }
  std::vector<Piece> pieces;
  for_each_piece_of(*made, rank, ranks, nullptr, [&](Piece piece) { pieces.push_back(std::move(piece)); });
  made->read = stored_bytes(pieces);
  return made;
}

std::uint64_t stored_bytes(const std::vector<Piece>& pieces) noexcept {
  std::uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += stored_bytes(piece);
  return bytes;
}

}  // namespace dynswap
