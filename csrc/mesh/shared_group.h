// Groups of weights of which ranks have one copy, and the parts of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/backend.h"

namespace dynswap {

/// What all ranks have of a group: its beginning, before the first weight of which other ranks may have other
/// bytes.
struct SharedPart {
  std::uint64_t identity = 0;  ///< of the bytes, and of their places in the group; 0: there are none
  std::size_t bytes = 0;       ///< on the device
};

/// A group of weights as far as all ranks have it, with this rank's sources. Immutable.
struct SharedGroup {
  std::uint64_t identity = 0;   ///< of its bytes, and of their places in the group
  std::size_t part = 0;         ///< bytes on the device that each rank copies; 0: not worth a collective
  WholeGroup group;             ///< without a base; what is in files is not read from mappings
  std::uint64_t read = 0;       ///< bytes of masters that this rank copies
  std::uint64_t all_bytes = 0;  ///< of its masters
};
using SharedGroupPtr = std::shared_ptr<const SharedGroup>;

/// A hash of two numbers.
std::uint64_t mixed(std::uint64_t value, std::uint64_t with) noexcept;

/// `identity`: a number for a source's bytes; 0 if other ranks may have other ones.
SharedPart shared_part_of(const WholeGroup& group,
                          const std::function<std::uint64_t(const Source&)>& identity);

/// A group's shared part, as `rank` of so many `ranks` shares it.
SharedGroupPtr shared_group(const WholeGroup& group, const SharedPart& part, std::size_t rank,
                            std::size_t ranks);

/// Bytes of the masters that pieces are read from.
std::uint64_t stored_bytes(const std::vector<Piece>& pieces) noexcept;

/// Calls `use` with the pieces of a group that lie in [from, to) of it, at `base`.
template <class Use>
void for_each_piece(const WholeGroup& group, std::size_t from, std::size_t to, std::byte* base,
                    const Use& use) {
  for (const WholeGroup::Part& weight : group.parts) {
    const std::size_t element = scalar_size(weight.source->wanted);
    const std::size_t begin = std::max(from, weight.offset);
    const std::size_t end = std::min(to, weight.offset + weight.source->wanted_bytes());
    if (begin >= end) continue;
    for_each_part(weight.source, (begin - weight.offset) / element, (end - begin) / element,
                  [&](const SourcePtr& source, std::uint64_t first, std::uint64_t count, std::uint64_t done) {
                    use(Piece{source, first, count, base + begin + done * element});
                  });
  }
}

/// Calls `use` with the pieces that a rank copies: its part, and the end of the group that is too short for
/// parts.
template <class Use>
void for_each_piece_of(const SharedGroup& group, std::size_t rank, std::size_t ranks, std::byte* base,
                       const Use& use) {
  for_each_piece(group.group, rank * group.part, (rank + 1) * group.part, base, use);
  for_each_piece(group.group, ranks * group.part, group.group.bytes, base, use);
}

}  // namespace dynswap
