// Amounts of memory in texts for people.
#pragma once

#include <array>
#include <cstddef>
#include <cstdio>
#include <string>

namespace dynswap {

/// With a binary unit, and exactly: "1.5 GiB (1610612736 bytes)". As format_bytes of the Python package has
/// it.
inline std::string amount(std::size_t bytes) {
  std::string exact = std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  if (bytes < 1024) return exact;
  double size = static_cast<double>(bytes) / 1024;
  std::size_t power = 0;
  for (; size >= 1024 && power < 3; ++power) size /= 1024;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.4g %ciB", size, "KMGT"[power]);
  return text.data() + (" (" + exact + ")");
}

}  // namespace dynswap
