// A file that goes with its object.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
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
      : path_(folder + "/dynswap_test_" + unique()), content_(random_bytes(bytes, seed)) {
    std::ofstream made(path_, std::ios::binary);
    if (!made) throw std::runtime_error("cannot make a file in " + folder);
    made.write(reinterpret_cast<const char*>(content_.data()), static_cast<std::streamsize>(bytes));
  }
  ~TempFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<std::byte>& content() const { return content_; }
  const std::byte* at(std::uint64_t offset) const { return content_.data() + offset; }

  void truncate(std::uint64_t bytes) { std::filesystem::resize_file(path_, bytes); }
  /// Moves the time of the last change by a second.
  void touch() {
    std::filesystem::last_write_time(path_,
                                     std::filesystem::last_write_time(path_) + std::chrono::seconds(1));
  }

 private:
  static std::string unique() {
    static std::atomic<unsigned> count{0};
    static const unsigned process = std::random_device()();
    return std::to_string(process) + "_" + std::to_string(++count);
  }

  std::string path_;
  std::vector<std::byte> content_;
};

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
