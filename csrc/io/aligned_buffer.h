// Scratch memory that the disk may write to directly.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace dynswap {

/// The address alignment that satisfies O_DIRECT on every disk that File reads with it.
inline constexpr std::size_t kDirectAlign = 4096;

/// Uninitialised bytes, aligned to kDirectAlign.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(std::size_t bytes)
      : data_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kDirectAlign}))) {}
  std::byte* data() const noexcept { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept {
      ::operator delete(data, std::align_val_t{kDirectAlign});
    }
  };
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace dynswap
