#include "platform/memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace dynswap {

std::size_t page_size() noexcept {
  static const auto size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

void* map_memory(std::size_t bytes) noexcept {
  constexpr std::size_t kHugePage = 2u << 20;
  void* const address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  // Fewer page faults, and fewer pages for the disk to look up. Advice only: a refusal changes nothing.
  if (bytes >= kHugePage) ::madvise(address, bytes, MADV_HUGEPAGE);
  return address;
}

void* map_shared(int file, std::uint64_t offset, std::size_t bytes) noexcept {
  void* const address =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(offset));
  return address == MAP_FAILED ? nullptr : address;
}

std::uint64_t inode_of(int file) noexcept {
  struct stat status{};
  return fstat(file, &status) == 0 ? static_cast<std::uint64_t>(status.st_ino) : 0;
}

void unmap_memory(void* address, std::size_t bytes) noexcept { ::munmap(address, bytes); }

}  // namespace dynswap
