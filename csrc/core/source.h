// Where a weight's bytes are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/scalar.h"

namespace dynswap {

class File;  // io/file.h: an open checkpoint file; the core only passes it on

/// Whether bytes of a file may stay in the page cache for the next time, and come from there: not, where it
/// pays, or always.
enum class Keep { no, yes, always };

/// One weight's bytes, and what they shall become. Immutable once it is given to the engine: a master
/// that changes place gets a new Source.
struct Source {
  std::string name;                    ///< the weight's name, for errors and statistics
  Scalar stored = Scalar::raw8;        ///< element type of the master
  Scalar wanted = Scalar::raw8;        ///< element type on the device
  std::uint64_t count = 0;             ///< elements
  const std::byte* address = nullptr;  ///< the master's bytes in this process (RAM, or a file mapping)
  std::shared_ptr<const File> file;    ///< set: read the bytes from here and leave `address` untouched
  std::uint64_t offset = 0;            ///< bytes from the start of `file`
  Keep keep = Keep::yes;               ///< what is read from `file`
  std::shared_ptr<const void> owner;   ///< keeps `address` valid
  bool pinned = false;                 ///< page-locked: the device may read `address` by itself

  std::uint64_t stored_bytes() const noexcept { return count * scalar_size(stored); }
  std::uint64_t wanted_bytes() const noexcept { return count * scalar_size(wanted); }
  bool cast() const noexcept { return stored != wanted; }
};

using SourcePtr = std::shared_ptr<const Source>;

}  // namespace dynswap
