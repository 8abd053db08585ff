#include "core/schedule.h"

#include <algorithm>

namespace dynswap {

std::optional<Schedule::Group> Schedule::Cursor::current() const noexcept {
  return size_ > 0 ? std::optional(last_[0]) : std::nullopt;
}

void Schedule::Cursor::push(Group group) noexcept {
  std::copy_backward(last_.begin(), last_.end() - 1, last_.end());
  last_[0] = group;
  size_ = std::min(size_ + 1, kLongest);
}

std::uint64_t Schedule::Cursor::key(std::size_t length) const noexcept {
  std::uint64_t key = 0x9e3779b97f4a7c15ull;
  for (std::size_t i = 0; i < length; ++i) {
    // splitmix64's finaliser: a good spread for consecutive numbers.
    key ^= last_[i] + 0x9e3779b97f4a7c15ull + (key << 6) + (key >> 2);
    key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9ull;
    key = (key ^ (key >> 27)) * 0x94d049bb133111ebull;
    key ^= key >> 31;
  }
  return key;
}

void Schedule::prime(const std::vector<Group>& order) {
  for (std::size_t i = 0; i < order.size() && order.size() > 1; ++i) {
    Cursor cursor;
    cursor.push(order[i]);
    runs_.back().insert_or_assign(cursor.key(1), Successor{order[(i + 1) % order.size()], false});
  }
}

bool Schedule::observe(Cursor& cursor, Group group) {
  if (cursor.current() == group) return false;
  for (std::size_t i = 0; i < kLengths.size(); ++i) {
    if (cursor.size_ < kLengths[i]) continue;
    if (runs_[i].size() >= kMostRuns) runs_[i].clear();
    const auto [entry, is_new] = runs_[i].try_emplace(cursor.key(kLengths[i]), Successor{group, false});
    Successor& successor = entry->second;
    if (is_new) continue;
    if (successor.next == group) {
      successor.confirmed = true;
    } else if (successor.confirmed) {
      successor.confirmed = false;
    } else {
      successor.next = group;
    }
  }
  cursor.push(group);
  return true;
}

std::optional<Schedule::Group> Schedule::advance(Cursor& cursor) const {
  for (std::size_t i = 0; i < kLengths.size(); ++i) {
    if (cursor.size_ < kLengths[i]) continue;
    const auto entry = runs_[i].find(cursor.key(kLengths[i]));
    if (entry == runs_[i].end()) continue;
    cursor.push(entry->second.next);
    return entry->second.next;
  }
  return std::nullopt;
}

}  // namespace dynswap
