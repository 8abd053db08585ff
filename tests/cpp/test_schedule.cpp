// The order of groups is learned, survives surprises, and heals (Invariant 5).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "check.h"
#include "core/schedule.h"
#include "random.h"

namespace dynswap::test {

namespace {

using Order = std::vector<Schedule::Group>;

Order count_up(std::size_t n) {
  Order order(n);
  std::iota(order.begin(), order.end(), Schedule::Group{0});
  return order;
}

Order reversed(Order order) {
  std::reverse(order.begin(), order.end());
  return order;
}

/// A consumer that counts how often the next group was not the expected one.
class Reader {
 public:
  explicit Reader(Schedule& schedule) : schedule_(schedule) {}

  /// Uses the groups in this order and returns the surprises.
  std::size_t read(const Order& order) {
    std::size_t surprises = 0;
    for (const Schedule::Group group : order) {
      Schedule::Cursor ahead = cursor_;
      if (schedule_.advance(ahead) != group) ++surprises;
      schedule_.observe(cursor_, group);
    }
    return surprises;
  }

  /// What is expected from here on.
  Order foresee(std::size_t n) const {
    Order order;
    Schedule::Cursor ahead = cursor_;
    while (order.size() < n) {
      const auto next = schedule_.advance(ahead);
      if (!next) break;
      order.push_back(*next);
    }
    return order;
  }

 private:
  Schedule& schedule_;
  Schedule::Cursor cursor_;
};

}  // namespace

TEST(schedule_knows_nothing_at_first) {
  Schedule schedule;
  EXPECT(Reader(schedule).foresee(1).empty());
}

TEST(schedule_expects_the_primed_order_and_its_wrap_around) {
  Schedule schedule;
  schedule.prime({3, 1, 4, 5});
  Reader reader(schedule);
  reader.read({3});
  EXPECT(reader.foresee(6) == Order({1, 4, 5, 3, 1, 4}));
}

TEST(schedule_learns_an_order_in_one_pass) {
  Schedule schedule;
  Reader reader(schedule);
  reader.read(count_up(20));
  EXPECT_EQ(reader.read(count_up(20)), 1u);  // the end is followed by the beginning: seen for the first time
  EXPECT_EQ(reader.read(count_up(20)), 0u);
  EXPECT(reader.foresee(3) == Order({0, 1, 2}));
}

TEST(schedule_corrects_a_wrong_prime) {
  Schedule schedule;
  schedule.prime(count_up(20));
  Reader reader(schedule);
  EXPECT(reader.read(reversed(count_up(20))) > 15);
  reader.read(reversed(count_up(20)));
  EXPECT_EQ(reader.read(reversed(count_up(20))), 0u);
}

TEST(schedule_tells_apart_the_places_of_a_repeated_group) {
  Schedule schedule;
  Reader reader(schedule);
  const Order order{0, 1, 2, 0, 1, 3, 0, 1, 4, 5};  // a shared block, used three times
  for (int pass = 0; pass < 3; ++pass) reader.read(order);
  EXPECT_EQ(reader.read(order), 0u);
}

TEST(schedule_does_not_count_staying) {
  Schedule schedule;
  Schedule::Cursor cursor;
  EXPECT(schedule.observe(cursor, 7));
  EXPECT(!schedule.observe(cursor, 7));
  EXPECT(cursor.current() == Schedule::Group{7});
  EXPECT(!schedule.advance(cursor));  // 7 after 7 has not been learned
}

TEST(schedule_forgets_nothing_over_a_branch_not_taken) {
  Schedule schedule;
  Reader reader(schedule);
  const Order order = count_up(20);
  for (int pass = 0; pass < 3; ++pass) reader.read(order);
  Order branch = order;
  branch.erase(branch.begin() + 7);
  EXPECT(reader.read(branch) <= 1);
  EXPECT_EQ(reader.read(order), 0u);
}

TEST(schedule_forgets_nothing_over_a_pass_of_probes) {
  // hasattr() over all modules, in the order of definition, which is not that of use.
  Schedule schedule;
  Reader reader(schedule);
  const Order order = reversed(count_up(30));
  for (int pass = 0; pass < 3; ++pass) reader.read(order);
  reader.read(count_up(30));
  EXPECT(reader.read(order) <= 1);  // the way from the probes back to the start is new
  EXPECT_EQ(reader.read(order), 0u);
}

TEST(schedule_heals_when_the_order_changes_for_good) {
  Schedule schedule;
  Reader reader(schedule);
  for (int pass = 0; pass < 5; ++pass) reader.read(count_up(30));
  Order changed = count_up(30);
  std::reverse(changed.begin() + 10, changed.begin() + 20);
  std::size_t passes = 0;
  while (reader.read(changed) > 0 && passes < 10) ++passes;
  EXPECT(passes <= 3);
}

TEST(schedule_keeps_consumers_apart) {
  Schedule schedule;
  Reader first(schedule);
  Reader second(schedule);
  for (int pass = 0; pass < 3; ++pass) {
    for (Schedule::Group group = 0; group < 10; ++group) {
      first.read({group});
      second.read({100 + group});
    }
  }
  EXPECT_EQ(first.read(count_up(10)), 0u);
  EXPECT(second.foresee(2) == Order({100, 101}));
}

TEST(schedule_experts_at_random_leave_the_rest_predicted) {
  // A mixture of experts: in each layer a shared group, then one of four. The shared groups are foreseen as
  // soon as an expert is known, whatever the others were.
  Schedule schedule;
  Reader reader(schedule);
  Random random(1);
  std::size_t surprises = 0;
  for (int pass = 0; pass < 60; ++pass) {
    for (Schedule::Group layer = 0; layer < 8; ++layer) {
      const auto expert = static_cast<Schedule::Group>(100 + 4 * layer + random.below(4));
      const std::size_t of_shared = reader.read({layer});
      reader.read({expert});
      if (pass >= 30) surprises += of_shared;
    }
  }
  EXPECT_EQ(surprises, 0u);
}

TEST(schedule_knows_what_follows_a_call) {
  // A round of three models: a text encoder, a denoiser that is called four times, a decoder.
  const std::vector<std::pair<std::uint32_t, Order>> round{{1, {0, 1, 2}}, {2, {3, 4, 5}}, {3, {3, 4, 5}},
                                                           {4, {3, 4, 5}}, {5, {3, 4, 5}}, {6, {6, 7}}};
  Schedule schedule;
  schedule.prime(count_up(8));
  Schedule::Cursor cursor;
  const auto read_round = [&] {
    std::size_t surprises = 0;
    for (const auto& [call, groups] : round) {
      for (std::size_t i = 0; i < groups.size(); ++i) {
        Schedule::Cursor ahead = cursor;
        if (schedule.advance(ahead) != groups[i]) ++surprises;
        if (i == 0) schedule.begin_call(cursor, call);
        schedule.observe(cursor, groups[i]);
      }
    }
    return surprises;
  };
  read_round();
  EXPECT_EQ(read_round(), 0u);
  EXPECT_EQ(read_round(), 0u);
  // From the last group of the last step on: the decoder, and then the next round.
  schedule.begin_call(cursor, 1);
  for (const Schedule::Group group : {0u, 1u, 2u}) schedule.observe(cursor, group);
  for (const std::uint32_t call : {2u, 3u, 4u, 5u}) {
    schedule.begin_call(cursor, call);
    for (const Schedule::Group group : {3u, 4u, 5u}) schedule.observe(cursor, group);
  }
  Schedule::Cursor ahead = cursor;
  for (const Schedule::Group group : {6u, 7u, 0u, 1u, 2u, 3u})
    EXPECT_EQ(schedule.advance(ahead).value(), group);
}

TEST(schedule_passes_over_a_call_that_uses_no_group) {
  Schedule schedule;
  Schedule::Cursor cursor;
  for (int round = 0; round < 2; ++round) {
    schedule.begin_call(cursor, 1);
    schedule.observe(cursor, 0);
    schedule.observe(cursor, 1);
    schedule.begin_call(cursor, 2);  // all that it uses is resident
    schedule.begin_call(cursor, 3);
    schedule.observe(cursor, 2);
  }
  schedule.begin_call(cursor, 1);
  schedule.observe(cursor, 0);
  schedule.observe(cursor, 1);
  EXPECT_EQ(schedule.advance(cursor).value(), 2u);
}

TEST(schedule_tells_what_it_has_learned_to_another) {
  Schedule schedule;
  const Order order{0, 3, 1, 2, 1};
  Reader reader(schedule);
  for (int pass = 0; pass < 4; ++pass) reader.read(order);
  for (Schedule::Group first = 0; first < 4; ++first) {
    Order told = schedule.order_after(first, 4);
    EXPECT(told.size() == order.size());
    Schedule other;
    other.learn(told);
    Reader pupil(other);
    pupil.read({0});  // from nowhere: what follows is known
    EXPECT(pupil.read({3, 1, 2, 1}) == 0 && pupil.read(order) == 0);
  }
}

TEST(schedule_tells_no_order_that_it_does_not_know) {
  EXPECT(Schedule().order_after(0, 4).empty());
  Schedule primed;
  primed.prime({2, 0, 1});
  Order told = primed.order_after(0, 3);
  std::rotate(told.begin(), std::find(told.begin(), told.end(), 2u), told.end());
  EXPECT(told == Order({2, 0, 1}));
}

}  // namespace dynswap::test
