// A file for bytes that come and go, in ranges that are used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/host_memory.h"
#include "io/file.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// Thread-safe. The file has no name, and goes with the last of its ranges, also if the process is killed.
class ScratchFile : public std::enable_shared_from_this<ScratchFile> {
 public:
  /// Throws SourceError that names the folder.
  ScratchFile(const std::string& folder, Keep keep) : keep_(keep), file_(File::scratch(folder, keep)) {}

  struct Range {
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
  };
  /// A range that nobody else has, for as long as the result lives: whole blocks, whose disk space is
  /// reserved. Null with Keep::yes, if the page cache has no room for it (HostUse::page_cache). Throws
  /// SourceError (the disk is full).
  std::shared_ptr<const Range> take(std::size_t bytes);
  const std::shared_ptr<const File>& file() const noexcept { return file_; }
  /// Whether a child has been forked since, which may read the ranges that it found taken. They go back to
  /// the file all the same: no more of it is to be taken.
  bool shared_with_child() const noexcept { return children() != made_before_; }

 private:
  void give_back(const Range& range);

  const Keep keep_;
  const unsigned process_ = forks(), made_before_ = children();
  const std::shared_ptr<const File> file_;
  Mutex mutex_;
  // LOCK: mutex_
  std::uint64_t end_ = 0;                                           ///< bytes
  std::vector<std::shared_ptr<const HostMemory::Charge>> charges_;  ///< of what is in the page cache
  std::map<std::uint64_t, std::size_t> free_;  ///< bytes, by the offset of the first; none meets another
};

}  // namespace dynswap
