// What tests ask of the operating system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace dynswap::test {

/// Whether there is memory at the address.
bool has_memory(const void* address);

std::size_t threads_of_this_process();

/// Takes a file out of the page cache. (tmpfs does not let go of it, and Windows has no call for it.)
void evict(const std::string& path);

/// Reads of a file that this thread has asked for so far; 0 where the kernel does not count them.
std::uint64_t requests();

/// Linux alone: pages of [offset, offset + bytes) in the page cache; `offset` is a multiple of the page size.
std::size_t cached_pages(const std::string& path, std::uint64_t offset, std::size_t bytes);

/// Linux alone: bytes that this process has made disks read so far; 0 where the kernel does not count them.
std::uint64_t bytes_from_disks();

/// A file that is mapped copy-on-write, as torch.load(mmap=True) and safetensors do it.
class PrivateMapping {
 public:
  explicit PrivateMapping(const std::string& path);
  ~PrivateMapping();
  PrivateMapping(const PrivateMapping&) = delete;
  PrivateMapping& operator=(const PrivateMapping&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace dynswap::test
