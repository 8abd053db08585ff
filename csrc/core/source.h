// Where a weight's bytes are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/scalar.h"
#include "platform/fork_safe.h"

namespace dynswap {

class File;  // io/file.h: an open checkpoint file; the core only passes it on

/// Whether bytes of a file may stay in the page cache for the next time, and come from there, where it pays.
enum class Keep : bool { no, yes };

/// Note [A small master has a page-locked copy]: a weight of a few kilobytes shares its pages with others,
/// and is worth neither a registration of its own nor a reader's thread. So it has room in a page-locked
/// block of ours, and whoever issues a copy compares that with the master first, and writes it anew if they
/// differ. The device so reads the master as it was when the copy was issued, also after writes that nothing
/// told of. A copy still under way reads the same bytes, unless somebody wrote to the master without waiting
/// for the pass, which the README's limits forbid for every page-locked master.
///
/// Note [A large master has a page-locked copy]: where masters cannot be page-locked in place for a device, a
/// large master has a copy too, as far as there is room (HostUse::copies). Comparing the two would take
/// longer than the copy to the device, so a count of the writes to the master tells whether they are equal.
/// After a write the master is staged, as if there were no copy. If the next request finds no further write,
/// the copy is brought up to date. So masters are staged in training, whose every step writes to all of them,
/// and in the first pass of inference, but not in its later passes.
struct PinnedCopy {
  std::shared_ptr<std::byte> bytes;  ///< LOCK: refreshing, to write
  Mutex refreshing;

  /// Counts the writes to a large master; nothing if not all are seen any more. Null for a small one.
  std::function<std::optional<std::uint64_t>()> writes;
  std::optional<std::uint64_t> seen;   ///< LOCK: refreshing; the count when it was last asked for
  std::optional<std::uint64_t> as_of;  ///< LOCK: refreshing; the count of the bytes that are in the copy
};

/// How weights of one tensor lie in coded bytes (docs/lossless.md). Immutable.
struct Coding {
  std::size_t block_weights = 0;      ///< of every block but the last, which may have fewer
  std::vector<std::uint64_t> blocks;  ///< where each begins, and the last one ends: bytes from the tensor's
  std::uint64_t weights = 0;          ///< of the whole tensor
};

/// Blocks of a coding: their number in it, and how many they are.
struct BlockRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

/// Bytes of a source, from its first.
struct StoredRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t bytes() const noexcept { return end - begin; }
};

/// One weight's bytes, and what they shall become. Immutable once it is given to the engine: a master
/// that changes place gets a new Source.
///
/// Note [A source of several parts]: a weight that was fused from several tensors of a checkpoint, such as
/// the experts of a layer, lies in several ranges of files. Its source has `parts`, each a source of one
/// range or of memory, and no file of its own. A request names the parts, in pieces (for_each_part()); so
/// whatever carries out a copy knows sources of one range only.
struct Source {
  std::string name;                    ///< the weight's name, for errors and statistics
  Scalar stored = Scalar::raw8;        ///< element type of the master, decoded
  Scalar wanted = Scalar::raw8;        ///< element type on the device
  std::uint64_t count = 0;             ///< elements
  const std::byte* address = nullptr;  ///< the master's bytes in this process (RAM, or a file mapping)
  std::shared_ptr<const File> file;    ///< set: read the bytes from here and leave `address` untouched
  bool mapped = false;     ///< `address` is in a mapping of a file (Note [A mapping outlives its file's end])
  bool of_file = false;    ///< the bytes are, or were until let go of, those of `file`
  bool allocated = false;  ///< `address` is the allocator's memory, which no other process has
  std::uint64_t offset = 0;  ///< bytes from the start of `file`; of parts: in phase with their offsets
  Keep keep = Keep::yes;     ///< what is read from `file`
  std::shared_ptr<const void> owner;     ///< keeps `address` valid
  std::shared_ptr<const Coding> coding;  ///< null: elements lie one after the other
  std::uint64_t coded_first = 0;         ///< of the tensor's weights, the source's first
  bool has_bytes = true;                 ///< false: its master has none now, and nothing is copied
  bool pinned =
      false;  ///< page-locked: the device may read it, at `pinned_copy` if that is set, else at `address`
  std::shared_ptr<PinnedCopy> pinned_copy;  ///< null: none
  /// Invariant: empty, or the elements of these, in order, are this source's; none of them has parts.
  std::vector<std::shared_ptr<const Source>> parts;

  /// The blocks that have elements [first, first + number), of which there are some. Only of a coded one.
  BlockRange blocks(std::uint64_t first, std::uint64_t number) const noexcept {
    const std::uint64_t begin = (coded_first + first) / coding->block_weights;
    return {begin, (coded_first + first + number - 1) / coding->block_weights + 1 - begin};
  }
  /// Where the bytes of elements [first, first + number) lie. Of coded ones, these are whole blocks.
  StoredRange stored_range(std::uint64_t first, std::uint64_t number) const noexcept {
    if (!coding) return {first * scalar_size(stored), (first + number) * scalar_size(stored)};
    if (number == 0) return {};
    const auto [begin, blocks_in_all] = blocks(first, number);
    return {coding->blocks[begin], coding->blocks[begin + blocks_in_all]};
  }
  std::uint64_t stored_bytes() const noexcept { return stored_range(0, count).bytes(); }
  /// Bytes from `address` (or `offset`) to behind the last that are its own. Coded ones do not begin there:
  /// their index does.
  std::uint64_t extent() const noexcept { return stored_range(0, count).end; }
  /// How many elements from `first` on have no more than so many bytes. They end where a block does, if not
  /// with the source.
  std::uint64_t elements_within(std::uint64_t first, std::uint64_t bytes) const noexcept;
  std::uint64_t wanted_bytes() const noexcept { return count * scalar_size(wanted); }
  bool cast() const noexcept { return stored != wanted; }
  /// Whether its bytes on the device are others than those that are stored.
  bool converted() const noexcept { return cast() || coding != nullptr; }
  /// Whether its bytes, or some of them, are read from files and not from memory.
  bool from_files() const noexcept { return file != nullptr || !parts.empty(); }
  /// Whether two sources have as many elements, of the same types: one can take the other's place in a plan.
  bool same_shape(const Source& other) const noexcept {
    return count == other.count && stored == other.stored && wanted == other.wanted;
  }
};

inline std::uint64_t Source::elements_within(std::uint64_t first, std::uint64_t bytes) const noexcept {
  const std::uint64_t left = count - first;
  if (!coding) return std::min(left, bytes / scalar_size(stored));
  const std::uint64_t block = (coded_first + first) / coding->block_weights;
  const auto begin = coding->blocks.begin() + static_cast<std::ptrdiff_t>(block);
  const auto end = std::upper_bound(begin, coding->blocks.end(), *begin + bytes) - 1;
  const auto last = static_cast<std::uint64_t>(end - coding->blocks.begin()) * coding->block_weights;
  return last <= coded_first + first ? 0 : std::min(left, last - (coded_first + first));
}

using SourcePtr = std::shared_ptr<const Source>;

/// A source of the same weight, from which nothing can be read, and which keeps nothing.
inline SourcePtr without_bytes(const Source& source) {
  auto made = std::make_shared<Source>();
  made->name = source.name;
  made->stored = source.stored;
  made->wanted = source.wanted;
  made->count = source.count;
  made->of_file = source.of_file;
  made->pinned = source.pinned;
  made->has_bytes = false;
  return made;
}

/// Calls `use(part, first, count, done)` for the parts that hold elements [first, first + count) of a source:
/// `first` and `count` are elements of that part, and `done` elements came before. A source without parts is
/// its own.
template <class Use>
void for_each_part(const SourcePtr& source, std::uint64_t first, std::uint64_t count, const Use& use) {
  if (source->parts.empty()) {
    if (count > 0) use(source, first, count, std::uint64_t{0});
    return;
  }
  std::uint64_t begin = 0, done = 0;  // the part's first element
  for (const SourcePtr& part : source->parts) {
    const std::uint64_t end = begin + part->count;
    const std::uint64_t from = std::max(begin, first + done);
    const std::uint64_t to = std::min(end, first + count);
    if (from < to) {
      use(part, from - begin, to - from, done);
      done += to - from;
    }
    begin = end;
  }
}

/// Elements [first, first + count) of a source, as a source of their own. A page-locked copy is not sliced:
/// of a master that has one the slice is as that of pageable memory.
inline std::shared_ptr<Source> slice(const SourcePtr& source, std::uint64_t first, std::uint64_t count) {
  auto made = std::make_shared<Source>(*source);
  const std::uint64_t bytes = source->coding ? 0 : first * scalar_size(source->stored);
  made->count = count;
  made->coded_first += source->coding ? first : 0;
  if (made->address != nullptr) made->address += bytes;
  made->offset += bytes;
  made->pinned = source->pinned && !source->pinned_copy;
  made->pinned_copy = nullptr;
  made->parts.clear();
  if (source->parts.empty()) return made;
  for_each_part(source, first, count,
                [&](const SourcePtr& part, std::uint64_t from, std::uint64_t length, std::uint64_t) {
                  made->parts.push_back(slice(part, from, length));
                });
  return made;
}

}  // namespace dynswap
