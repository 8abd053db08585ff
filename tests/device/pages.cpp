// Whether memory is still what it was when it was registered: a mapping that was made anew at the same
// addresses has not the mark.
#include "pages.h"

#include <sys/mman.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

namespace pretend {

bool may_be_locked(const void* address) {
  std::FILE* const file = std::fopen("/proc/self/maps", "r");
  if (file == nullptr) return true;
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  bool may = true;
  char line[512];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    std::uintptr_t from = 0, to = 0;
    char access[5] = "";
    unsigned long inode = 0;
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %lu", &from, &to, access, &inode) < 3 ||
        at < from || at >= to)
      continue;
    const bool in_memory = std::strstr(line, "/dev/shm/") != nullptr ||
                           std::strstr(line, "/memfd:") != nullptr ||
                           std::strstr(line, "/dev/zero") != nullptr;
    may = access[1] == 'w' && (access[3] != 's' || inode == 0 || in_memory);
    break;
  }
  std::fclose(file);
  return may;
}

bool mapped(const void* address, std::size_t bytes) {
  constexpr std::uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<std::uintptr_t>(address) / kPage * kPage;
  const std::size_t length = reinterpret_cast<std::uintptr_t>(address) + bytes - begin;
  std::vector<unsigned char> resident((length + kPage - 1) / kPage);
  return mincore(reinterpret_cast<void*>(begin), length, resident.data()) == 0;
}

void mark_pages(void* address, std::size_t bytes) {
  // A core dump leaves them out: nothing else heeds it, and the system shows it of each mapping.
  (void)madvise(address, bytes, MADV_DONTDUMP);
}

void write_to_pages(void* address, std::size_t bytes) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14
  (void)madvise(address, bytes, kPopulateWrite);
}

void unmark_pages(void* address, std::size_t bytes) { (void)madvise(address, bytes, MADV_DODUMP); }

bool pages_marked(const void* address, std::size_t bytes) {
  std::FILE* const file = std::fopen("/proc/self/smaps", "r");
  if (file == nullptr) return true;
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  std::size_t marked = 0;
  std::uintptr_t first = 0, last = 0;
  char line[512];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    std::uintptr_t from = 0, to = 0;
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2) {
      first = from < begin ? begin : from;
      last = to > begin + bytes ? begin + bytes : to;
    } else if (first < last && std::strncmp(line, "VmFlags:", 8) == 0) {
      if (std::strstr(line, " dd") != nullptr) marked += last - first;
      first = last = 0;
    }
  }
  std::fclose(file);
  return marked == bytes;
}

}  // namespace pretend
