// A file for bytes that come and go, in ranges that are used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "io/file.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// Thread-safe. The file has no name, and goes with the last of its ranges, also if the process is killed.
class ScratchFile : public std::enable_shared_from_this<ScratchFile> {
 public:
  /// Throws SourceError that names the folder.
  explicit ScratchFile(const std::string& folder) : file_(File::scratch(folder)) {}

  struct Range {
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
  };
  /// A range that nobody else has, for as long as the result lives. It begins at a disk's block.
  std::shared_ptr<const Range> take(std::size_t bytes);
  const std::shared_ptr<const File>& file() const noexcept { return file_; }

 private:
  void give_back(const Range& range);

  const std::shared_ptr<const File> file_;
  Mutex mutex_;
  // LOCK: mutex_
  std::uint64_t end_ = 0;                      ///< bytes
  std::map<std::uint64_t, std::size_t> free_;  ///< bytes, by the offset of the first; none meets another
};

}  // namespace dynswap
