// A random program that uses a random model on the fake device: one seed, one run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dynswap::test {

/// Runs the engine through the program that `seed` draws, and returns what went wrong: nothing, for an
/// engine that is right. The same seed gives the same run.
std::vector<std::string> run_random_program(std::uint64_t seed);

}  // namespace dynswap::test
