// io: Haste.
#include "io/haste.h"

#include <chrono>

#include "check.h"

namespace {

using namespace dynswap;
using namespace std::chrono_literals;

/// A consumer that goes through groups of 10 ms and waits for a share of that time.
class Consumer {
 public:
  explicit Consumer(Haste& haste) : haste_(haste) {}

  void run(Haste::Clock::duration time, double waits) {
    for (const auto end = now_ + time; now_ < end; now_ += 10ms) {
      haste_.waited(std::chrono::duration_cast<Haste::Clock::duration>(10ms * waits));
      haste_.reading(now_);
    }
  }
  void rest(Haste::Clock::duration time) { now_ += time; }
  /// How long it takes, without waits, until reads are cheap.
  Haste::Clock::duration until_calm() {
    const auto begin = now_;
    while (haste_.pace() == Pace::quick && now_ - begin < 1h) run(10ms, 0);
    return now_ - begin;
  }

 private:
  Haste& haste_;
  Haste::Clock::time_point now_ = Haste::Clock::time_point{} + 24h;
};

TEST(haste_ends_when_nobody_waits) {
  Haste haste;
  Consumer consumer(haste);
  EXPECT(haste.pace() == Pace::quick);
  consumer.run(5s, 0.2);
  EXPECT(haste.pace() == Pace::quick);
  consumer.run(5s, 0.01);
  EXPECT(haste.pace() == Pace::cheap);
  consumer.run(300ms, 0.2);
  EXPECT(haste.pace() == Pace::quick);
}

TEST(haste_does_not_swing) {
  Haste haste;
  Consumer consumer(haste);
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
  Haste haste;
  Consumer consumer(haste);
  for (int pass = 0; pass < 20; ++pass) {
    consumer.run(200ms, 0.5);
    consumer.rest(5s);
  }
  EXPECT(haste.pace() == Pace::quick);
}

}  // namespace
