// GatheredCopies: ranks that do not do what the others do, and the end.
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "gathering_rank.h"
#include "io/file.h"
#include "mesh/gathered_copies.h"
#include "temp_file.h"

namespace dynswap::test {

namespace {

/// Passes 6 to 12 of a rank, beside one that misbehaves in the sixth: right bytes or SourceError, each of
/// them in time. Returns what the last pass has read.
std::uint64_t go_on(Rank& rank, int& errors) {
  std::uint64_t bytes = 0;
  for (int pass = 6; pass <= 12; ++pass) {
    const auto begin = std::chrono::steady_clock::now();
    bytes = rank.engine->stats().bytes_moved;
    const auto try_to = [&](const std::function<void()>& step) {
      try {
        step();
      } catch (const SourceError&) {
        ++errors;
        EXPECT(pass < 12);
      }
    };
    try_to([&] { rank.copies->begin_pass(); });
    for (std::size_t group = 0; group < rank.model.groups.size(); ++group) try_to([&] { rank.use(group); });
    bytes = rank.engine->stats().bytes_moved - bytes;
    EXPECT(std::chrono::steady_clock::now() - begin < milliseconds(10000));
  }
  return bytes;
}

/// What becomes of the other ranks.
enum class Others {
  gather_on,  ///< as if nothing were
  copy_whole,
  fail,  ///< once each, and then they copy whole
};

/// Three ranks, the first of which does `misbehave`.
void beside_one_that_misbehaves(const std::function<void(Rank&, FakeGroup&)>& misbehave, Others others) {
  const auto group = group_of(3, milliseconds(1500), milliseconds(1500));
  const Model model = even_model(5);
  std::atomic<int> still_at_it{2};
  on_each(3, [&](std::size_t number) {
    Rank rank(group->rank(number), model);
    for (int pass = 1; pass <= 5; ++pass) rank.pass();
    if (number == 0) {
      misbehave(rank, *group);
      return wait_until([&] { return still_at_it == 0; });
    }
    int errors = 0;
    const std::uint64_t bytes = go_on(rank, errors);
    const GatheredCopies::Figures figures = rank.copies->figures();
    --still_at_it;
    EXPECT_EQ(errors, others == Others::fail ? 1 : 0);
    EXPECT(others == Others::gather_on ? bytes < model.bytes * 35 / 100 : bytes == model.bytes);
    EXPECT_EQ(figures.why_not == "", others == Others::gather_on);
  });
  EXPECT_EQ(group->violations(), 0);
  EXPECT(group->timeouts() == 0 || others == Others::fail);
}

TEST(gathered_copies_beside_one_that_stops) {
  beside_one_that_misbehaves([](Rank&, FakeGroup&) {}, Others::gather_on);
}

TEST(gathered_copies_beside_one_that_stops_in_the_middle) {
  // It knows the groups of an order that has been in force, and there is none any more.
  beside_one_that_misbehaves(
      [](Rank& rank, FakeGroup&) {
        rank.copies->begin_pass();
        rank.use(0);
      },
      Others::copy_whole);
}

TEST(gathered_copies_beside_one_that_calls_more_often) {
  beside_one_that_misbehaves(
      [](Rank& rank, FakeGroup&) {
        for (int pass = 6; pass <= 14; ++pass) rank.pass();
      },
      Others::gather_on);
}

TEST(gathered_copies_beside_one_that_calls_less_often) {
  beside_one_that_misbehaves(
      [](Rank& rank, FakeGroup&) {
        for (int pass = 6; pass < 8; ++pass) rank.pass();
      },
      Others::gather_on);
}

TEST(gathered_copies_beside_one_that_closes) {
  beside_one_that_misbehaves([](Rank& rank, FakeGroup&) { rank.close(); }, Others::copy_whole);
}

TEST(gathered_copies_beside_one_that_closes_in_the_middle) {
  beside_one_that_misbehaves(
      [](Rank& rank, FakeGroup&) {
        rank.copies->begin_pass();
        const auto held = rank.use(0);
        rank.close();
        held.front().check();
        EXPECT_THROWS(rank.use(1), ClosedError);
      },
      Others::copy_whole);
}

TEST(gathered_copies_beside_one_that_dies) {
  beside_one_that_misbehaves([](Rank&, FakeGroup& group) { group.kill(0); }, Others::fail);
}

TEST(gathered_copies_beside_one_that_dies_in_the_middle) {
  beside_one_that_misbehaves(
      [](Rank& rank, FakeGroup& group) {
        rank.copies->begin_pass();
        rank.use(0);
        group.kill(0);
      },
      Others::fail);
}

TEST(gathered_copies_beside_one_that_cannot_read) {
  for (const bool of_file : {false, true}) {
    beside_one_that_misbehaves(
        [&](Rank& rank, FakeGroup&) {
          const auto master = std::make_shared<const std::vector<std::uint64_t>>(*rank.model.groups[2][0]);
          const auto source = source_of(master, name_of(2, 0), /*first=*/true);
          TempFile file(source->stored_bytes());
          if (of_file) {
            source->address = nullptr;
            source->file = File::open(file.path());
            file.truncate(100);
          }
          if (!of_file) refuse(*master);
          rank.replace(2, source, master);
          int passed = 0;
          for (int pass = 6; pass <= 12; ++pass) passed += try_pass(rank);
          EXPECT_EQ(passed, 0);
        },
        Others::fail);
    refuse({});
  }
}

TEST(gathered_copies_that_fail_under_several_threads) {
  for (int round = 0; round < 5; ++round) {
    const auto group = group_of(2, milliseconds(400), milliseconds(400));
    const Model model = even_model(5);
    std::atomic<bool> over{false};
    on_each(2, [&](std::size_t number) {
      Rank rank(group->rank(number), model);
      for (int pass = 1; pass <= 5; ++pass) rank.pass();
      if (number == 1) return wait_until([&] { return over.load(); });
      rank.copies->begin_pass();
      rank.use(0);
      rank.use(1);
      group->kill(1);
      std::atomic<int> errors{0};
      on_each(4, [&](std::size_t thread) {
        for (std::size_t at = 0; at < 8; ++at) {
          try {
            rank.use(2 + (at + thread / 2) % 2);
          } catch (const SourceError&) {
            ++errors;
          }
        }
      });
      EXPECT(errors > 0);
      over = true;
    });
  }
}

TEST(gathered_copies_are_not_written_to_once_they_have_failed) {
  const auto group = group_of(2, milliseconds(1500), milliseconds(300));
  const Model model = even_model(5);
  std::atomic<bool> over{false};
  on_each(2, [&](std::size_t number) {
    Rank rank(group->rank(number), model);
    for (int pass = 1; pass <= 5; ++pass) rank.pass();
    if (number == 1) return wait_until([&] { return over.load(); });
    rank.copies->begin_pass();
    rank.use(0);
    rank.use(1);
    group->kill(1);  // which has not begun that pass; the next groups are on their way to this rank
    EXPECT_THROWS(rank.copies->begin_pass(), SourceError);
    std::vector<Rank::Used> held;
    while (held.empty()) {
      try {
        held = rank.use(2);
      } catch (const SourceError&) {
      }
    }
    std::this_thread::sleep_for(milliseconds(1000));
    for (const Rank::Used& used : held) used.check();
    over = true;
  });
}

TEST(gathered_copies_after_the_end_are_whole) {
  const auto group = group_of(2);
  const Model model = even_model(4);
  on_each(2, [&](std::size_t number) {
    Rank rank(group->rank(number), model);
    for (int pass = 1; pass <= 4; ++pass) rank.pass();
    rank.copies->close();
    rank.pass();
    EXPECT_EQ(rank.bytes_of_pass(), model.bytes);
    rank.plan();
    rank.pass();
    EXPECT_EQ(rank.bytes_of_pass(), model.bytes);
  });
  EXPECT_EQ(group->violations() + group->timeouts(), 0);
}

TEST(gathered_copies_let_masters_go_without_a_lock) {
  const auto group = group_of(2);
  on_each(2, [&](std::size_t number) {
    Rank rank(group->rank(number), even_model(4));
    std::atomic<int> gone{0};
    const std::weak_ptr<GatheredCopies> copies = rank.copies;
    for (int pass = 1; pass <= 20; ++pass) {
      const std::size_t which = static_cast<std::size_t>(pass) % 4;
      const Master master = rank.model.groups[which][0];
      const auto source = source_of(master, name_of(which, 0), /*first=*/true);
      source->owner = std::shared_ptr<const void>(master.get(), [master, copies, &gone](const void*) {
        if (const auto alive = copies.lock()) static_cast<void>(alive->figures());
        ++gone;
      });
      if (pass % 3 == 0) rank.replace(which, source, master);
      if (pass % 7 == 0) rank.plan();
      rank.pass();
    }
    rank.close();
    EXPECT(gone > 10);
  });
  EXPECT_EQ(group->violations() + group->timeouts(), 0);
}

TEST(gathered_copies_close_under_who_calls) {
  for (int round = 0; round < 20; ++round) {
    const auto group = group_of(2);
    group->set_latency(milliseconds(round % 3));
    const Model model = even_model(4);
    on_each(2, [&](std::size_t number) {
      Rank rank(group->rank(number), model);
      for (int pass = 1; pass <= 4; ++pass) rank.pass();
      std::atomic<int> refused{0};
      std::vector<std::thread> threads;
      for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] {
          try {
            for (;;) try_pass(rank);
          } catch (const ClosedError&) {
            ++refused;
          }
        });
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200 * (round % 5)));
      for (int i = 0; i < 2; ++i) threads.emplace_back([&] { rank.close(); });
      for (std::thread& thread : threads) thread.join();
      EXPECT_EQ(refused.load(), 2);
      rank.copies->begin_pass();
    });
    EXPECT_EQ(group->violations() + group->timeouts(), 0);
  }
}

TEST(gathered_copies_leave_leases_and_no_masters) {
  const auto group = group_of(2);
  on_each(2, [&](std::size_t number) {
    std::vector<Rank::Used> held;
    std::weak_ptr<const void> master;
    std::vector<std::byte> bytes;
    {
      Model model = even_model(4);
      Rank rank(group->rank(number), model);
      for (int pass = 1; pass <= 4; ++pass) rank.pass();
      rank.copies->begin_pass();
      held = rank.use(2);
      master = held.front().master;
      held.front().master = nullptr;
      bytes.assign(held.front().lease.data(), held.front().lease.data() + 1000);
    }
    EXPECT(master.expired());
    EXPECT(std::memcmp(held.front().lease.data(), bytes.data(), bytes.size()) == 0);
  });
}

}  // namespace

}  // namespace dynswap::test
