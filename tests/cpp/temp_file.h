// A file that goes with its object, and what the page cache holds of it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "random.h"

namespace dynswap::test {

inline std::vector<std::byte> random_bytes(std::size_t bytes, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::byte> result(bytes);
  for (std::byte& byte : result) byte = static_cast<std::byte>(random.next());
  return result;
}

class TempFile {
 public:
  explicit TempFile(std::size_t bytes, std::uint64_t seed = 1,
                    const std::string& folder = std::filesystem::temp_directory_path().string())
      : path_(folder + "/dynswap_test_XXXXXX"), content_(random_bytes(bytes, seed)) {
    fd_ = ::mkstemp(path_.data());
    if (fd_ < 0) throw std::runtime_error("cannot make a file in " + folder);
    write(0, content_.data(), bytes);
  }
  ~TempFile() {
    ::close(fd_);
    ::unlink(path_.c_str());
  }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<std::byte>& content() const { return content_; }
  const std::byte* at(std::uint64_t offset) const { return content_.data() + offset; }

  void write(std::uint64_t offset, const std::byte* data, std::size_t bytes) {
    while (bytes > 0) {
      const ssize_t written = ::pwrite(fd_, data, bytes, static_cast<off_t>(offset));
      if (written <= 0) throw std::runtime_error("cannot write " + path_);
      offset += static_cast<std::uint64_t>(written);
      data += written;
      bytes -= static_cast<std::size_t>(written);
    }
  }
  void truncate(std::uint64_t bytes) {
    if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0)
      throw std::runtime_error("cannot truncate " + path_);
  }
  /// Moves the time of the last change by a second.
  void touch() {
    struct stat status{};
    ::fstat(fd_, &status);
    const timespec times[2] = {status.st_atim, {status.st_mtim.tv_sec + 1, status.st_mtim.tv_nsec}};
    ::futimens(fd_, times);
  }
  /// Takes the file out of the page cache. (tmpfs does not let go of it.)
  void evict() {
    ::fsync(fd_);
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
  }
  /// Pages of [offset, offset + bytes) in the page cache; `offset` is a multiple of the page size.
  std::size_t cached_pages(std::uint64_t offset, std::size_t bytes) const {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    void* const view = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd_, static_cast<off_t>(offset));
    if (view == MAP_FAILED) throw std::runtime_error("cannot map " + path_);
    std::vector<unsigned char> resident((bytes + page - 1) / page);
    ::mincore(view, bytes, resident.data());
    ::munmap(view, bytes);
    std::size_t count = 0;
    for (const unsigned char flag : resident) count += flag & 1;
    return count;
  }

 private:
  std::string path_;
  std::vector<std::byte> content_;
  int fd_ = -1;
};

/// Bytes that this process has made disks read so far; 0 where the kernel does not count them.
inline std::uint64_t bytes_from_disks() {
  std::ifstream io("/proc/self/io");
  std::string field;
  std::uint64_t value = 0;
  while (io >> field >> value) {
    if (field == "read_bytes:") return value;
  }
  return 0;
}

/// What the exception that `body` throws says; empty if it throws none.
template <typename F>
std::string message_of(F&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace dynswap::test
