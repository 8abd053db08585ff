// Ranks that are threads of one process. What a process group of torch.distributed may do, and does now and
// then, is done always: a collective that fails has scribbled over the memory, and its parts reach the others
// all the same.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "mesh/ranks.h"

namespace dynswap::test {

/// Thread-safe. Collectives are matched by the order of each rank's calls.
class FakeGroup : public std::enable_shared_from_this<FakeGroup> {
 public:
  using Milliseconds = std::chrono::milliseconds;
  FakeGroup(std::size_t size, Milliseconds gather_timeout, Milliseconds tell_timeout)
      : gather_timeout_(gather_timeout), tell_timeout_(tell_timeout), members_(size) {}

  std::unique_ptr<Ranks> rank(std::size_t rank) { return std::make_unique<Member>(shared_from_this(), rank); }

  /// Nothing of what the rank does reaches the others any more, and nobody tells them.
  void kill(std::size_t rank) {
    const std::lock_guard lock(mutex_);
    members_[rank].dead = true;
  }

  /// What has been told takes so long to arrive.
  void set_latency(Milliseconds latency) { latency_ = latency; }

  /// Ranks that gathered different groups, or of different sizes, under one number.
  std::size_t violations() const { return read(violations_); }
  std::size_t timeouts() const { return read(timeouts_); }
  std::size_t gathered() const { return read(gathered_); }

 private:
  using Bytes = std::vector<std::byte>;
  struct Place {
    std::size_t gathers = 0, tells = 0;  ///< begun
    bool gone = false, dead = false;
    std::string state = "has not called the model";
  };

  class Member final : public Ranks {
   public:
    Member(std::shared_ptr<FakeGroup> group, std::size_t rank) : group_(std::move(group)), rank_(rank) {}
    ~Member() override {
      const std::lock_guard lock(group_->mutex_);
      group_->members_[rank_].gone = true;
      group_->changed_.notify_all();
    }
    std::size_t rank() const noexcept override { return rank_; }
    std::size_t size() const noexcept override { return group_->members_.size(); }
    Stream stream() const noexcept override { return 0; }
    void all_gather(std::byte* memory, std::size_t part) override { group_->gather(rank_, memory, part); }
    std::unique_ptr<Told> tell(const Words& words) override {
      const std::lock_guard lock(group_->mutex_);
      const std::size_t number = group_->members_[rank_].tells++;
      if (!dead()) group_->tellings_[number].emplace(rank_, words);
      group_->changed_.notify_all();
      return std::make_unique<Telling>(*this, number);
    }
    void note_pass(std::uint64_t pass) override {
      note("is in call " + std::to_string(pass) + " of the model", false);
      const std::lock_guard lock(group_->mutex_);
      if (dead()) return;
      group_->latest_pass_ = std::max(group_->latest_pass_, pass);
    }
    bool begun(std::uint64_t pass) override {
      const std::lock_guard lock(group_->mutex_);
      return group_->latest_pass_ >= pass;
    }
    void note(const std::string& state, bool failed) noexcept override {
      const std::lock_guard lock(group_->mutex_);
      if (dead()) return;
      group_->members_[rank_].state = state;
      group_->failed_ = group_->failed_ || failed;
      group_->changed_.notify_all();
    }
    std::string states() noexcept override {
      const std::lock_guard lock(group_->mutex_);
      std::string text;
      for (const Place& place : group_->members_) text += place.state + "; ";
      return text;
    }

   private:
    bool dead() const { return group_->members_[rank_].dead; }

    struct Telling final : Told {
      Telling(Member& of, std::size_t as) : member(of), number(as) {}
      std::vector<Words> wait() override {
        FakeGroup& group = *member.group_;
        std::this_thread::sleep_for(group.latency_);
        std::unique_lock lock(group.mutex_);
        group.wait(lock, member.rank_, group.tellings_[number], group.tell_timeout_);
        std::vector<Words> words;
        for (const auto& [rank, each] : member.group_->tellings_[number]) words.push_back(each);
        return words;
      }
      Member& member;  // as with torch, it must not outlive it
      const std::size_t number;
    };
    const std::shared_ptr<FakeGroup> group_;
    const std::size_t rank_;
  };

  /// Waits until all have come. Throws if one does not. That another one has failed it sees at times only.
  template <class Come>
  void wait(std::unique_lock<std::mutex>& lock, std::size_t own, const Come& come, Milliseconds timeout) {
    constexpr Milliseconds kLook{200};
    const auto all = [&] { return come.size() == members_.size(); };
    const auto cut_off = [&] {
      for (std::size_t rank = 0; rank < members_.size(); ++rank)
        if (members_[rank].gone && !come.contains(rank)) return true;
      return members_[own].dead;
    };
    for (Milliseconds waited{0}; waited < timeout; waited += kLook) {
      const bool known = changed_.wait_for(lock, kLook, [&] { return all() || cut_off(); });
      if (all()) return;
      if (known || failed_) throw std::runtime_error("another rank has failed or gone");
    }
    ++timeouts_;
    throw std::runtime_error("timed out");
  }

  void gather(std::size_t rank, std::byte* memory, std::size_t part) {
    std::unique_lock lock(mutex_);
    std::map<std::size_t, Bytes>& parts = gatherings_[members_[rank].gathers++];
    if (!members_[rank].dead) parts.emplace(rank, Bytes(memory + rank * part, memory + (rank + 1) * part));
    changed_.notify_all();
    try {
      wait(lock, rank, parts, gather_timeout_);
    } catch (...) {
      std::memset(memory, 0xee, members_.size() * part);
      throw;
    }
    ++gathered_;
    for (const auto& [other, bytes] : parts) {
      // The masters' words have their group's number in front (see word_of()).
      if (bytes.size() != part || std::memcmp(bytes.data() + 4, memory + rank * part + 4, 4) != 0)
        ++violations_;
      std::memcpy(memory + other * part, bytes.data(), std::min(part, bytes.size()));
    }
  }

  std::size_t read(const std::size_t& figure) const {
    const std::lock_guard lock(mutex_);
    return figure;
  }

  const Milliseconds gather_timeout_, tell_timeout_;
  Milliseconds latency_{0};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // LOCK: mutex_, all below.
  std::vector<Place> members_;
  std::map<std::size_t, std::map<std::size_t, Bytes>> gatherings_;
  std::map<std::size_t, std::map<std::size_t, Ranks::Words>> tellings_;
  bool failed_ = false;
  std::uint64_t latest_pass_ = 0;
  std::size_t violations_ = 0, timeouts_ = 0, gathered_ = 0;
};

}  // namespace dynswap::test
