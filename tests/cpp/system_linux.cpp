#include "system.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <vector>

#include "platform/memory.h"

namespace dynswap::test {

namespace {

/// 0 if the kernel does not have it.
std::uint64_t value_in(const char* path, const std::string& name) {
  std::ifstream io(path);
  std::string field;
  std::uint64_t value = 0;
  while (io >> field >> value) {
    if (field == name) return value;
  }
  return 0;
}

}  // namespace

bool has_memory(const void* address) {
  const Pages page = pages_around(address, 1);
  return ::msync(reinterpret_cast<void*>(page.begin), page.end - page.begin, MS_ASYNC) == 0;
}

std::size_t threads_of_this_process() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) ++count;
  return count;
}

void evict(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ::fsync(file);
  ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  ::close(file);
}

std::size_t cached_pages(const std::string& path, std::uint64_t offset, std::size_t bytes) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  void* const view = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, static_cast<off_t>(offset));
  ::close(file);
  if (view == MAP_FAILED) throw std::runtime_error("cannot map " + path);
  std::vector<unsigned char> resident((bytes + page_size() - 1) / page_size());
  ::mincore(view, bytes, resident.data());
  ::munmap(view, bytes);
  std::size_t count = 0;
  for (const unsigned char flag : resident) count += flag & 1;
  return count;
}

std::uint64_t requests() { return value_in("/proc/thread-self/io", "syscr:"); }

std::uint64_t bytes_from_disks() { return value_in("/proc/self/io", "read_bytes:"); }

PrivateMapping::PrivateMapping(const std::string& path) : bytes_(std::filesystem::file_size(path)) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  void* const address = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  ::close(file);
  if (address == MAP_FAILED) throw std::runtime_error("cannot map " + path);
  data_ = static_cast<std::byte*>(address);
}

PrivateMapping::~PrivateMapping() { ::munmap(data_, bytes_); }

}  // namespace dynswap::test
