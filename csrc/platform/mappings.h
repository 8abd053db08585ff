// Which file, and where in it, an address of this process is mapped from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace dynswap {

/// A snapshot of the process's file mappings (/proc/self/maps). It is how a weight is recognised as a
/// range of its checkpoint file, whoever mapped it: torch.load(mmap=True), safetensors, or the user.
/// Empty on Windows, which does not tell: there every weight is plain RAM to us.
class Mappings {
 public:
  struct Range {
    std::string path;
    std::uint64_t offset = 0;  ///< bytes from the start of the file
    std::uint64_t inode = 0;
    std::uintptr_t mapped_at = 0;  ///< the address at which the mapping begins that holds it
  };

  /// Memory that lies in one mapping of a file, or in none.
  struct Part {
    std::size_t bytes = 0;
    bool mapped = false;
    std::optional<Range> range;  ///< as from find()
  };

  static Mappings of_this_process();

  /// Where [address, address + bytes) comes from. Nothing if it is not, as a whole, one mapping of an
  /// ordinary file that still has its name (shared memory, deleted files, and what this process may write
  /// into the file through are plain RAM to us).
  std::optional<Range> find(const void* address, std::size_t bytes) const;

  /// [address, address + bytes) where it is cut by mappings' ends, in order.
  std::vector<Part> parts_of(const void* address, std::size_t bytes) const;

  /// Whether any of these bytes are mapped from a file, also one that this process may write into.
  bool holds_any(const void* address, std::size_t bytes) const;

  /// The path of the file that the address is mapped from, also where this process may write into the file;
  /// null if there is none that still has its name.
  const std::string* file_at(const void* address) const;

 private:
  struct Mapping {
    bool is_source = false;  ///< find() gives it
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    Range file;
  };

  const Mapping* mapping_at(std::uintptr_t begin) const;

  std::vector<Mapping> mappings_;  ///< all that are of ordinary files, in the order of their addresses
};

}  // namespace dynswap
