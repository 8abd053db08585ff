// GatheredCopies: ranks that are threads, each with an engine over the host backend. Note [Each rank brings a
// part]. DYNSWAP_SEEDS=10000 for a long run of the random programs, DYNSWAP_SEED=n for one alone.
#include "mesh/gathered_copies.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "gathering_rank.h"
#include "random.h"

namespace dynswap::test {

namespace {

TEST(gathered_copies_read_their_part_alone) {
  for (const std::size_t size : {2, 3, 4}) {
    const auto group = group_of(size);
    const Model model = even_model(6);
    on_each(size, [&](std::size_t rank) {
      Rank one(group->rank(rank), model);
      one.pass();
      one.pass();
      for (int pass = 3; pass < 8; ++pass) {
        const double part = static_cast<double>(one.bytes_of_pass()) / static_cast<double>(model.bytes);
        EXPECT(part <= 1.02 / static_cast<double>(size));
      }
      const GatheredCopies::Figures figures = one.copies->figures();
      EXPECT_EQ(figures.passes, 7);
      EXPECT_EQ(figures.gathered, 5 * model.groups.size());
      EXPECT(figures.received_bytes > 4 * model.bytes * (size - 1) / size);
      EXPECT_EQ(figures.why_not, "");
    });
    EXPECT_EQ(group->violations() + group->timeouts(), 0);
  }
}

/// What one rank does, while the others do nearly the same.
void run_random_rank(Rank& rank, std::uint64_t seed, std::size_t number) {
  Random own(seed * 16 + number), all(seed);
  const std::size_t groups = rank.model.groups.size();
  std::vector<std::size_t> order;
  for (std::size_t group = 0; group < groups; ++group) order.push_back(group);
  const std::size_t passes = all.between(4, 8);
  std::deque<std::vector<Rank::Used>> held;
  const auto let_go = [&] {
    for (const Rank::Used& used : held.front()) used.check();
    held.pop_front();
  };
  const bool calm = all.chance(0.3);
  for (std::size_t pass = 0; pass < passes; ++pass) {
    rank.copies->begin_pass();
    if (all.chance(0.2)) std::swap(order[all.below(groups)], order[all.below(groups)]);
    std::vector<std::size_t> uses = order;
    if (!calm && own.chance(0.2)) std::swap(uses[own.below(groups)], uses[own.below(groups)]);
    if (!calm && own.chance(0.1)) std::reverse(uses.begin(), uses.end());
    for (const std::size_t group : uses) {
      if (!calm && own.chance(0.05)) continue;
      held.push_back(rank.use(group));
      while (held.size() > own.below(4)) let_go();
      if (own.chance(0.1)) std::this_thread::sleep_for(std::chrono::microseconds(own.below(300)));
      if (!calm && own.chance(0.02)) rank.plan();
      if (!calm && own.chance(0.01)) {  // a master that only this rank has
        auto words = std::make_shared<std::vector<std::uint64_t>>(*rank.model.groups[group][0]);
        words->back() = own.next();
        const std::string name = own.chance(0.5) ? "private" : "of rank " + std::to_string(number);
        rank.replace(group, source_of(words, name, /*first=*/true), words);
      }
    }
  }
  while (!held.empty()) let_go();
}

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr ? std::strtoull(value, nullptr, 10) : otherwise;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kSeeds = 40;
#else
constexpr std::uint64_t kSeeds = 200;
#endif

TEST(gathered_copies_are_right_in_random_programs) {
  const std::uint64_t first = from_environment("DYNSWAP_SEED", 1);
  const std::uint64_t seeds =
      std::getenv("DYNSWAP_SEED") != nullptr ? 1 : from_environment("DYNSWAP_SEEDS", kSeeds);
  std::size_t gathered = 0;
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    Random random(seed);
    const std::size_t size = random.between(2, 4);
    std::vector<std::size_t> words(random.between(4, 10));
    for (std::size_t& each : words) each = random.between(1u << 10, 8u << 10);
    const Model model(words, random);
    const bool always = random.chance(0.5);
    const std::size_t at_once = random.chance(0.5) ? 0 : 64u << 10;
    const auto group = group_of(size);
    on_each(size, [&](std::size_t rank) {
      Rank one(group->rank(rank), model, always, at_once);
      run_random_rank(one, seed, rank);
    });
    if (group->violations() + group->timeouts() > 0)
      fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": different groups, or a rank that waited");
    gathered += group->gathered();
  }
  EXPECT(gathered > seeds);
}

TEST(gathered_copies_come_where_one_rank_needs_none) {
  const auto group = group_of(2);
  group->set_latency(milliseconds(20));  // so an order is decided when its thread has nothing else to do
  const Model model = even_model(6);
  std::atomic<bool> over{false};
  on_each(2, [&](std::size_t number) {
    Rank rank(group->rank(number), model);
    for (int pass = 1; pass <= 5; ++pass) rank.pass();
    const auto begin = std::chrono::steady_clock::now();
    const std::uint64_t before = rank.copies->figures().unused;
    if (number == 0) {
      EXPECT(rank.bytes_of_pass() < model.bytes * 52 / 100);
      EXPECT(std::chrono::steady_clock::now() - begin < milliseconds(10000));
      over = true;
    } else {
      rank.copies->begin_pass();
      wait_until([&] { return over.load(); });
      EXPECT(rank.copies->figures().unused > before);
    }
    rank.pass();
  });
  EXPECT_EQ(group->violations() + group->timeouts(), 0);
}

TEST(gathered_copies_between_two_plans_wait_for_the_next) {
  const auto group = group_of(2);
  const Model model = even_model(6);
  std::atomic<bool> closed{false};
  on_each(2, [&](std::size_t number) {
    Rank rank(group->rank(number), model);
    for (int pass = 1; pass <= 5; ++pass) rank.pass();
    if (number == 0) {
      rank.copies->begin_pass();
      rank.engine->close();
      closed = true;
      std::this_thread::sleep_for(milliseconds(700));  // it has lost its patience by then
      rank.plan();
      for (std::size_t each = 0; each < model.groups.size(); ++each) rank.use(each);
    } else {
      wait_until([&] { return closed.load(); });
      rank.pass();
    }
    for (int pass = 7; pass <= 9; ++pass) rank.pass();
    EXPECT(rank.bytes_of_pass() < model.bytes * 52 / 100);
  });
  EXPECT_EQ(group->violations() + group->timeouts(), 0);
}

TEST(gathered_copies_by_two_threads_of_a_rank) {
  const auto group = group_of(2);
  const Model model = even_model(5);
  on_each(2, [&](std::size_t number) {
    Rank rank(group->rank(number), model);
    on_each(2, [&](std::size_t thread) {
      Random random(number * 2 + thread);
      for (int pass = 0; pass < 30; ++pass) {
        rank.copies->begin_pass();
        for (std::size_t each = 0; each < model.groups.size(); ++each)
          if (random.chance(0.9)) rank.use(each);
      }
    });
    for (int pass = 0; pass < 10; ++pass) rank.pass();  // one thread again, and an order
    EXPECT(rank.copies->figures().order > 0);
  });
  EXPECT_EQ(group->violations() + group->timeouts(), 0);
}

/// A host that notes whether times are to be kept.
class TimedHost final : public Backend {
 public:
  explicit TimedHost(std::atomic<bool>& keeps) : keeps_(keeps), host_(&cast, 1, 0) {}
  const char* name() const noexcept override { return "timed host"; }
  const DeviceTraits& traits() const noexcept override { return host_.traits(); }
  Memory allocate(std::size_t bytes) override { return host_.allocate(bytes); }
  EventPtr copy(CopyRequest request) override { return host_.copy(std::move(request)); }
  void wait(Stream consumer, const EventPtr& copied) override { host_.wait(consumer, copied); }
  EventPtr record(Stream consumer) override { return host_.record(consumer); }
  EventPtr mark(Stream consumer) override { return host_.mark(consumer); }
  void keep_times(bool keep) override { keeps_ = keep; }
  void close() noexcept override { host_.close(); }
  void synchronise(const EventPtr& event) noexcept override { host_.synchronise(event); }
  std::uint64_t host_synchronisations() const noexcept override { return 0; }

 private:
  std::atomic<bool>& keeps_;
  HostBackend host_;
};

TEST(gathered_copies_keep_times_while_somebody_looks) {
  for (const bool recorded : {false, true}) {
    const auto group = group_of(2);
    const Model model = even_model(4);
    on_each(2, [&](std::size_t number) {
      std::atomic<bool> keeps{false};
      Rank rank(group->rank(number), model, /*always=*/false);
      rank.plan(std::make_unique<TimedHost>(keeps));
      rank.pass();
      EXPECT(keeps);  // both kinds of copies are being measured
      if (recorded) rank.engine->record(true);
      for (int pass = 2; pass <= 10; ++pass) rank.pass();
      const GatheredCopies::Figures figures = rank.copies->figures();
      EXPECT(figures.whole_speed > 0 && figures.gather_speed > 0);
      EXPECT_EQ(keeps, recorded);
      rank.engine->record(false);
      EXPECT(!keeps);
    });
  }
}

TEST(gathered_copies_tell_private_weights_from_small_groups) {
  const auto group = group_of(2);
  const Model model({512, 32u << 10, 32u << 10, 32u << 10, 32u << 10}, Random(1));
  on_each(2, [&](std::size_t number) {
    Rank rank(group->rank(number), model);
    for (int pass = 1; pass <= 3; ++pass) rank.pass();
    EXPECT_EQ(rank.copies->figures().private_bytes, 0);
    const Master own = model.groups[1][0];
    rank.replace(1, source_of(own, "private", /*first=*/true), own);
    rank.pass();
    EXPECT(rank.copies->figures().private_bytes >= (32u << 13));
  });
  EXPECT_EQ(group->violations() + group->timeouts(), 0);
}

}  // namespace

}  // namespace dynswap::test
