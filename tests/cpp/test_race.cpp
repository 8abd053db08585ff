// The engine on the adversarial device: no seed may see a wrong byte. DYNSWAP_SEEDS=10000 for the long run,
// DYNSWAP_SEED=n for one seed alone.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "random_program.h"

namespace dynswap::test {

namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::strtoull(value, nullptr, 10) : otherwise;
}

}  // namespace

TEST(race_no_seed_sees_a_wrong_byte) {
  const bool one = std::getenv("DYNSWAP_SEED") != nullptr;
  const std::uint64_t first = from_environment("DYNSWAP_SEED", 1);
  const std::uint64_t seeds = one ? 1 : from_environment("DYNSWAP_SEEDS", 200);
  std::uint64_t bad = 0;
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    const std::vector<std::string> violations = run_random_program(seed);
    if (!violations.empty()) ++bad;
    for (const std::string& violation : violations) {
      fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": " + violation);
    }
  }
  std::printf("%llu of %llu seeds found something\n", static_cast<unsigned long long>(bad),
              static_cast<unsigned long long>(seeds));
}

}  // namespace dynswap::test
