// A range of a file is read as it was written.
#pragma once

#include <cstring>
#include <string>

#include "check.h"
#include "io/aligned_buffer.h"
#include "io/file.h"
#include "temp_file.h"

namespace dynswap::test {

/// Reads a range to an address that is `phase` past a page, and looks at the bytes there and around them.
inline void expect_reads(const File& file, const TempFile& written, std::uint64_t offset, std::size_t bytes,
                         std::size_t phase, Keep keep = Keep::yes, ReadMode mode = ReadMode::quick) {
  constexpr std::size_t kAround = 4096;
  constexpr std::byte kUntouched{0xEE};
  const AlignedBuffer buffer(bytes + 2 * kAround);
  std::byte* const dst = buffer.data() + phase;
  std::memset(buffer.data(), static_cast<int>(kUntouched), bytes + 2 * kAround);
  file.read(offset, dst, bytes, "w", keep, mode);
  EXPECT(std::memcmp(dst, written.at(offset), bytes) == 0);
  for (std::size_t i = 0; i < phase; ++i)
    EXPECT_EQ(static_cast<int>(buffer.data()[i]), static_cast<int>(kUntouched));
  for (std::size_t i = 0; i < kAround; ++i)
    EXPECT_EQ(static_cast<int>(dst[bytes + i]), static_cast<int>(kUntouched));
}

}  // namespace dynswap::test
