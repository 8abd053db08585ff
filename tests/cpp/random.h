// Random numbers that are the same on every platform (std::uniform_int_distribution is not).
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynswap::test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  /// splitmix64.
  std::uint64_t next() noexcept {
    state_ += 0x9e3779b97f4a7c15ull;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  /// In [0, bound); bound > 0.
  std::size_t below(std::size_t bound) noexcept { return static_cast<std::size_t>(next() % bound); }
  /// In [low, high].
  std::size_t between(std::size_t low, std::size_t high) noexcept { return low + below(high - low + 1); }
  /// In [0, 1).
  double unit() noexcept { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  bool chance(double probability) noexcept { return unit() < probability; }

 private:
  std::uint64_t state_;
};

}  // namespace dynswap::test
