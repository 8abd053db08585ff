// GatheredCopies in a forked child, which is none of the ranks.
#include <memory>

#include "check.h"
#include "core/check.h"
#include "forked_child.h"
#include "gathering_rank.h"
#include "mesh/gathered_copies.h"

namespace dynswap::test {

namespace {

TEST(gathered_copies_go_on_when_one_rank_forks) {
  const auto group = group_of(2);
  const Model model = even_model(4);
  on_each(2, [&](std::size_t number) {
    auto rank = std::make_unique<Rank>(group->rank(number), model);
    for (int pass = 1; pass <= 5; ++pass) rank->pass();
    if (number == 0) {
      EXPECT(in_a_forked_child([&] {
        rank->copies->begin_pass();
        const GatheredCopies::Figures figures = rank->copies->figures();
        rank.reset();
        return figures.passes == 5 && figures.why_not == kOnlyInParent;
      }));
    }
    for (int pass = 6; pass <= 8; ++pass) rank->pass();
    EXPECT(rank->bytes_of_pass() < model.bytes * 52 / 100);
  });
  EXPECT_EQ(group->violations() + group->timeouts(), 0);
}

}  // namespace

}  // namespace dynswap::test
