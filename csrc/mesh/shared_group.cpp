#include "mesh/shared_group.h"

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

std::uint64_t identity_of(const WholeGroup& group,
                          const std::function<std::uint64_t(const Source&)>& identity) {
  std::uint64_t whole = mixed(group.bytes, group.parts.size());
  for (const WholeGroup::Part& weight : group.parts) {
    const std::uint64_t of_source = identity(*weight.source);
    if (of_source == 0) return 0;
    whole = mixed(mixed(whole, of_source), weight.offset);
    whole = mixed(whole, static_cast<std::uint64_t>(weight.source->wanted));
  }
  return whole == 0 ? 1 : whole;
}

SharedGroupPtr shared_group(const WholeGroup& group, std::uint64_t identity, std::size_t rank,
                            std::size_t ranks) {
  auto made = std::make_shared<SharedGroup>();
  made->part = group.bytes / ranks / kAlignment * kAlignment;
  if (made->part < kLeast) made->part = 0;
  made->identity = identity;
  made->group = group;
  made->group.base = nullptr;
  for (WholeGroup::Part& weight : made->group.parts) {
    made->all_bytes += weight.source->stored_bytes();
    weight.source = as_all_have(weight.source);
  }
  for_each_piece_of(*made, rank, ranks, nullptr, [&](const Piece& piece) {
    made->read += piece.count * scalar_size(piece.source->stored);
  });
  return made;
}

}  // namespace dynswap
