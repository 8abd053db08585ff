#include "core/schedule.h"

#include <algorithm>
#include <bit>

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

void Schedule::Runs::reserve(std::size_t runs) {
  if (2 * runs <= entries_.size()) return;
  std::vector<Entry> old(std::bit_ceil(std::max<std::size_t>(2 * runs, 16)));
  old.swap(entries_);
  for (const Entry& entry : old) {
    if (entry.used) entries_[place_of(entry.key)] = entry;
  }
}

std::size_t Schedule::Runs::place_of(std::uint64_t key) const noexcept {
  const std::size_t mask = entries_.size() - 1;
  std::size_t place = key & mask;  // keys are hashes already
  while (entries_[place].used && entries_[place].key != key) place = (place + 1) & mask;
  return place;
}

const Schedule::Successor* Schedule::Runs::find(std::uint64_t key) const noexcept {
  if (entries_.empty()) return nullptr;
  const Entry& entry = entries_[place_of(key)];
  return entry.used ? &entry.successor : nullptr;
}

std::pair<Schedule::Successor*, bool> Schedule::Runs::try_emplace(std::uint64_t key, Group next) {
  reserve(size_ + 1);
  Entry& entry = entries_[place_of(key)];
  const bool is_new = !entry.used;
  if (is_new) {
    entry = {key, {next, false}, true};
    ++size_;
  }
  return {&entry.successor, is_new};
}

void Schedule::Runs::clear() noexcept {
  std::fill(entries_.begin(), entries_.end(), Entry());
  size_ = 0;
}

void Schedule::prime(const std::vector<Group>& order) {
  // Room for a forward and a backward pass.
  for (Runs& runs : runs_) runs.reserve(std::min(4 * order.size(), kMostRuns));
  for (std::size_t i = 0; i < order.size() && order.size() > 1; ++i) {
    Cursor cursor;
    cursor.push(order[i]);
    *runs_.back().try_emplace(cursor.key(1), 0).first = {order[(i + 1) % order.size()], false};
  }
}

void Schedule::learn(const std::vector<Group>& order) {
  Cursor cursor;
  for (int pass = 0; pass < 2; ++pass) {
    for (const Group group : order) observe(cursor, group);
  }
}

std::vector<Schedule::Group> Schedule::order_after(Group first, std::size_t groups) const {
  constexpr std::size_t kPasses = 4, kUses = 4;  // of each group in a pass, on average
  std::vector<Group> walked{first};
  Cursor cursor;
  cursor.push(first);
  while (walked.size() < kPasses * kUses * groups) {
    const std::optional<Group> next = advance(cursor);
    if (!next) return {};
    walked.push_back(*next);
  }
  // Where it began, it did not know yet what had come before.
  const auto second_half = walked.begin() + static_cast<std::ptrdiff_t>(walked.size() / 2);
  for (auto repeated = second_half + 1; repeated - second_half <= walked.end() - repeated; ++repeated) {
    if (std::equal(repeated, walked.end(), second_half)) return {second_half, repeated};
  }
  return {};
}

void Schedule::begin_call(Cursor& cursor, std::uint32_t call) {
  if (calls_.size() <= std::max(call, cursor.call_)) calls_.resize(std::max(call, cursor.call_) + 1);
  Call& over = calls_[cursor.call_];
  const std::optional<Group> last = cursor.moves_ > 0 ? cursor.current() : std::nullopt;
  if (over.next == call && over.moves == cursor.moves_ && over.last == last) {
    over.confirmed = true;
  } else if (over.confirmed) {
    over.confirmed = false;
  } else {
    over.next = call;
    over.moves = cursor.moves_;
    over.last = last;
  }
  cursor.call_ = call;
  cursor.moves_ = 0;
}

bool Schedule::observe(Cursor& cursor, Group group) {
  if (cursor.current() == group) return false;
  if (cursor.call_ != 0 && cursor.moves_++ == 0) calls_[cursor.call_].first = group;
  for (std::size_t i = 0; i < kLengths.size(); ++i) {
    if (cursor.size_ < kLengths[i]) continue;
    if (runs_[i].size() >= kMostRuns) runs_[i].clear();
    const auto [known, is_new] = runs_[i].try_emplace(cursor.key(kLengths[i]), group);
    Successor& successor = *known;
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

/// The first group of the call that follows, if the cursor is where its call ended the last time.
std::optional<Schedule::Group> Schedule::first_after(Cursor& cursor) const {
  if (cursor.call_ == 0 || cursor.moves_ == 0) return std::nullopt;
  const Call* over = &calls_[cursor.call_];
  if (over->next == 0 || over->moves != cursor.moves_ || over->last != cursor.current()) return std::nullopt;
  // A call that uses residents alone has no first group: what follows it is next.
  for (std::size_t passed = 0; passed < calls_.size() && over->next != 0; ++passed) {
    const std::uint32_t number = over->next;
    over = &calls_[number];
    if (over->first) {
      cursor.call_ = number;
      cursor.moves_ = 1;
      return over->first;
    }
  }
  return std::nullopt;
}

std::optional<Schedule::Group> Schedule::advance(Cursor& cursor) const {
  if (const std::optional<Group> first = first_after(cursor)) {
    cursor.push(*first);
    return first;
  }
  for (std::size_t i = 0; i < kLengths.size(); ++i) {
    if (cursor.size_ < kLengths[i]) continue;
    const Successor* const successor = runs_[i].find(cursor.key(kLengths[i]));
    if (successor == nullptr) continue;
    cursor.push(successor->next);
    if (cursor.call_ != 0) ++cursor.moves_;
    return successor->next;
  }
  return std::nullopt;
}

}  // namespace dynswap
