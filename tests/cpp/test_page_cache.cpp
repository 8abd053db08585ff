// io: what enters the page cache.
#include "io/page_cache.h"

#include <chrono>

#include "check.h"

namespace {

using namespace dynswap;

constexpr std::uint64_t kMiB = 1u << 20;

TEST(admission_is_for_what_is_read_again) {
  Admission admission(64 * kMiB);
  for (std::uint64_t offset = 0; offset < 64 * kMiB; offset += 64u << 10) EXPECT(!admission.admit(offset));
  EXPECT(admission.admit(0));
  EXPECT(admission.admit(64 * kMiB - 1));
  Admission tiny(1);
  EXPECT(!tiny.admit(0));
  EXPECT(tiny.admit(0));
}

TEST(admission_ends_where_it_never_pays_back) {
  using std::chrono::milliseconds;
  for (const int slowness : {2, 10}) {
    Admission admission(64 * kMiB);
    EXPECT(!admission.admit(0));
    admission.took(/*through_cache=*/false, 64 * kMiB, milliseconds(100));
    EXPECT(admission.admit(0));  // nothing is known of the other way yet
    admission.took(/*through_cache=*/true, 64 * kMiB, milliseconds(100) * slowness);
    EXPECT_EQ(admission.admit(0), slowness == 2);
  }
}

}  // namespace
