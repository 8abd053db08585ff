// io: ReadPolicy.
#include "io/read_policy.h"

#include <chrono>

#include "check.h"

namespace {

using namespace dynswap;
using namespace std::chrono_literals;

/// A consumer that goes through groups of 10 ms and waits for a share of that time.
class Consumer {
 public:
  explicit Consumer(ReadPolicy& read_policy) : read_policy_(read_policy) {}

  void run(ReadPolicy::Clock::duration time, double waits) {
    for (const auto end = now_ + time; now_ < end; now_ += 10ms) {
      read_policy_.waited(std::chrono::duration_cast<ReadPolicy::Clock::duration>(10ms * waits));
      read_policy_.reading(now_);
    }
  }
  void rest(ReadPolicy::Clock::duration time) { now_ += time; }
  /// How long it takes, without waits, until reads are cheap.
  ReadPolicy::Clock::duration until_calm() {
    const auto begin = now_;
    while (read_policy_.mode() == ReadMode::quick && now_ - begin < 1h) run(10ms, 0);
    return now_ - begin;
  }

 private:
  ReadPolicy& read_policy_;
  ReadPolicy::Clock::time_point now_ = ReadPolicy::Clock::time_point{} + 24h;
};

TEST(haste_ends_when_nobody_waits) {
  ReadPolicy read_policy;
  Consumer consumer(read_policy);
  EXPECT(read_policy.mode() == ReadMode::quick);
  consumer.run(5s, 0.2);
  EXPECT(read_policy.mode() == ReadMode::quick);
  consumer.run(5s, 0.01);
  EXPECT(read_policy.mode() == ReadMode::cheap);
  consumer.run(300ms, 0.2);
  EXPECT(read_policy.mode() == ReadMode::quick);
}

TEST(haste_does_not_swing) {
  ReadPolicy read_policy;
  Consumer consumer(read_policy);
  auto last = consumer.until_calm();
  for (int i = 0; i < 5; ++i) {
    consumer.run(300ms, 0.5);
    const auto next = consumer.until_calm();
    EXPECT(next > last + last / 2);
    last = next;
  }
  // Long without waiting, it tries sooner again.
  consumer.run(1h, 0);
  consumer.run(300ms, 0.5);
  EXPECT(consumer.until_calm() < last / 2);
}

TEST(haste_learns_nothing_from_pauses) {
  ReadPolicy read_policy;
  Consumer consumer(read_policy);
  for (int pass = 0; pass < 20; ++pass) {
    consumer.run(200ms, 0.5);
    consumer.rest(5s);
  }
  EXPECT(read_policy.mode() == ReadMode::quick);
}

}  // namespace
