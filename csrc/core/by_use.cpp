#include "core/by_use.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace dynswap {

void UseScore::add(double now) noexcept {
  const double at = 1 + now;
  // log2(2^a + 2^b) = b + log2(1 + 2^(a - b))
  log2_ = log2_ == 0 ? at : at + std::log2(1 + std::exp2(log2_ - at));
}

std::uint64_t UseScore::rank() const noexcept {
  constexpr double kSteps = 1u << 24;
  return static_cast<std::uint64_t>(log2_ * kSteps);
}

bool UseOrder::observe(Cursor& cursor, Group group) {
  if (cursor.current == group) return false;
  Cursor ahead = cursor;
  const std::uint32_t as_expected = advance(ahead) == group ? cursor.as_expected + 1 : 0;
  if (cursor.before) {
    auto& [latest, earlier] = followed_[*cursor.current];
    if (latest.before != cursor.before) std::swap(latest, earlier);
    if (latest.before != cursor.before)
      latest = {cursor.before, group, false};
    else
      latest = {cursor.before, group, latest.next == group};
  }
  cursor = {cursor.current, group, as_expected};
  return true;
}

bool UseOrder::is_fixed(const Cursor& cursor) noexcept {
  constexpr std::uint32_t kInARow = 8;
  return cursor.as_expected >= kInARow;
}

std::optional<UseOrder::Group> UseOrder::advance(Cursor& cursor) const {
  if (!cursor.before) return std::nullopt;
  for (const Followed& followed : followed_[*cursor.current]) {
    if (followed.before != cursor.before || !followed.twice) continue;
    cursor = {cursor.current, followed.next, cursor.as_expected};
    return followed.next;
  }
  return std::nullopt;
}

std::uint32_t GuessLimit::learn(std::size_t right, std::size_t wrong, std::size_t in_the_way) noexcept {
  // What is in the way holds up all that is needed then. What is not takes the disk and the bus from others,
  // and to guess at all takes a little time.
  constexpr double kInTheWay = 2, kWrong = 0.25, kEffort = 0.05, kLately = 1.0 / 16, kMost = 64;
  constexpr std::uint32_t kShortest = 8, kLongest = 1024;
  const double net = static_cast<double>(right) - kInTheWay * static_cast<double>(in_the_way) -
                     kWrong * static_cast<double>(wrong) - kEffort;
  worth_ += (net - worth_) * kLately;
  most_ = in_the_way > 0 ? std::max(most_ - 0.5, 1.0) : std::min(most_ + 0.125, kMost);
  if (worth_ > 0.25) pause_ = kShortest;
  if (worth_ >= -kEffort / 2) return 0;
  most_ = 1;
  worth_ = 0;
  return std::exchange(pause_, std::min(2 * pause_, kLongest));
}

double half_life(std::size_t cache_bytes, const Groups& groups) {
  std::size_t total = 0, experts = 0;
  for (const GroupTraits& group : groups) {
    total += group.by_use ? group.bytes : 0;
    experts += group.by_use ? 1 : 0;
  }
  if (total == 0) return 1;
  const double held =
      static_cast<double>(cache_bytes) * static_cast<double>(experts) / static_cast<double>(total);
  return std::max(1.0, 2 * held);
}

}  // namespace dynswap
