// Each of the engine's protections (core/protection.h) is needed, and would be missed: taken away, some seed
// of the fake device sees a wrong byte or another violation. This binary's core is built with
// DYNSWAP_MUTANTS.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "check.h"
#include "protection_names.h"
#include "random_program.h"

#ifndef DYNSWAP_MUTANTS
#error "test_protections.cpp belongs in the binary whose core has DYNSWAP_MUTANTS"
#endif

namespace dynswap::test {

namespace {

constexpr unsigned kCountedSeeds = 200;  ///< as many as CI runs
constexpr unsigned kMostSeeds = 2000;    ///< for a hazard rarer than that

/// Takes a protection away as long as it lives.
class Without {
 public:
  explicit Without(Protection protection) { removed_protection = protection; }
  ~Without() { removed_protection = Protection::none; }
};

}  // namespace

TEST(protections_all_in_place) {
  for (std::uint64_t seed = 1; seed <= kMostSeeds; ++seed) {
    for (const std::string& violation : run_random_program(seed)) {
      fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": " + violation);
    }
  }
}

TEST(protections_each_is_missed) {
  for (int i = 1; i <= static_cast<int>(kLastOfEngine); ++i) {
    const auto protection = static_cast<Protection>(i);
    const Without without(protection);
    std::string first;
    unsigned caught = 0;
    for (std::uint64_t seed = 1; seed <= kCountedSeeds || (caught == 0 && seed <= kMostSeeds); ++seed) {
      const std::vector<std::string> violations = run_random_program(seed);
      if (!violations.empty() && ++caught == 1)
        first = "seed " + std::to_string(seed) + ": " + violations.front();
    }
    if (caught == 0) {
      fail(__FILE__, __LINE__, std::string(name_of(protection)) + ": no seed notices that it is gone");
    } else {
      std::printf("  without %-22s %3u of %u seeds; %s\n", name_of(protection), caught, kCountedSeeds,
                  first.c_str());
    }
  }
}

TEST(protections_a_seed_shows_it_again) {
  // What cannot be reproduced cannot be understood. Compared where there is something to compare.
  const Without without(Protection::write_after_read);
  std::size_t compared = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const std::vector<std::string> violations = run_random_program(seed);
    EXPECT(run_random_program(seed) == violations);
    compared += violations.size();
  }
  EXPECT(compared > 20);
}

}  // namespace dynswap::test
