// Each of the engine's protections (core/protection.h) is needed, and would be missed: taken away, some seed
// of the fake device sees a wrong byte or another violation. This binary's core is built with
// DYNSWAP_MUTANTS.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "fake_device.h"
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

/// Saved tensors leave for the host on a stream of their own, and come back. Returns what went wrong.
std::vector<std::string> bring_back_what_was_saved(std::uint64_t seed) {
  auto device = std::make_shared<FakeDevice>(seed);
  EngineOptions options;
  options.short_lived_bytes = 1u << 20;
  auto backend = device->backend();
  Backend& device_side = *backend;
  const auto engine = std::make_shared<Engine>(std::move(backend), options);
  engine->plan();
  std::vector<std::byte> host(512);
  for (int step = 0; step < 4; ++step) {
    const auto value = static_cast<std::byte>(step + 1);
    const WeightId saved = *engine->take_short_lived();
    auto source = std::make_shared<Source>();
    source->name = "saved";
    source->count = host.size();
    source->address = host.data();
    device->host_write(/*stream=*/9, host.data(), host.size(), value);
    engine->offer(saved, source, device_side.record(9));
    const auto expected = std::make_shared<const std::vector<std::byte>>(host.size(), value);
    {
      const Lease lease = engine->acquire(saved, 0);
      device->kernel(0, lease.data(), expected, "saved");
    }
    engine->give_back_short_lived(saved);
    device->drain();
  }
  engine->close();
  return device->violations();
}

}  // namespace

TEST(protections_what_is_saved_comes_back_after_it_left) {
  constexpr std::uint64_t kSeeds = 200;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    for (const std::string& violation : bring_back_what_was_saved(seed)) fail(__FILE__, __LINE__, violation);
  }
  const Without without(Protection::saved_back_after_left);
  unsigned caught = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed)
    caught += bring_back_what_was_saved(seed).empty() ? 0 : 1;
  EXPECT(caught > 0);
}

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
