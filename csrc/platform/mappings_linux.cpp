#include "platform/mappings.h"

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string_view>
#include <utility>

namespace dynswap {

namespace {

bool is_checkpoint_like(std::string_view path) {
  const auto starts = [&](std::string_view prefix) { return path.substr(0, prefix.size()) == prefix; };
  constexpr std::string_view kDeleted = " (deleted)";
  const bool deleted =
      path.size() >= kDeleted.size() && path.substr(path.size() - kDeleted.size()) == kDeleted;
  return !path.empty() && path.front() == '/' && !deleted && !starts("/dev/") && !starts("/memfd:") &&
         !starts("/SYSV");
}

}  // namespace

Mappings Mappings::of_this_process() {
  Mappings result;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    Mapping mapping;
    int path_at = 0;
    char access[5] = "";  // "rw-p": p for private, s for shared
    // 7f..-7f.. rw-p 00000000 fd:00 12345   /path with spaces
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s %" SCNx64 " %*s %" SCNu64 " %n",
                    &mapping.begin, &mapping.end, access, &mapping.file.offset, &mapping.file.inode,
                    &path_at) < 5) {
      continue;
    }
    mapping.file.path = path_at > 0 ? line.substr(static_cast<std::size_t>(path_at)) : std::string();
    // Nobody cuts short a file that has lost its name, nor shared memory: both are RAM to us.
    if (mapping.file.inode == 0 || !is_checkpoint_like(mapping.file.path)) continue;
    // Writing to a shared mapping changes the file itself, which is not to be taken for somebody else's
    // change.
    const bool writes_to_file = access[1] == 'w' && access[3] == 's';
    mapping.is_source = !writes_to_file;
    // Writing to a private mapping can split it; what is one file range is one mapping to us.
    if (!result.mappings_.empty()) {
      Mapping& last = result.mappings_.back();
      if (last.is_source == mapping.is_source && last.end == mapping.begin &&
          last.file.inode == mapping.file.inode && last.file.path == mapping.file.path &&
          last.file.offset + (last.end - last.begin) == mapping.file.offset) {
        last.end = mapping.end;
        continue;
      }
    }
    result.mappings_.push_back(std::move(mapping));
  }
  return result;
}

}  // namespace dynswap
