// Runs the tests of this binary: all of them, or those whose name contains the first argument.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "check.h"

namespace dynswap::test {

namespace {

std::mutex mutex;
std::size_t failures_of_test = 0;
constexpr std::size_t kMostPrinted = 20;  // a broken loop must not bury the first failure

}  // namespace

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

void fail(const char* file, int line, const std::string& message) {
  const std::lock_guard lock(mutex);
  if (failures_of_test++ < kMostPrinted) std::printf("%s:%d: %s\n", file, line, message.c_str());
}

namespace {

/// Returns whether the test passed.
bool run(const Test& test) {
  {
    const std::lock_guard lock(mutex);
    failures_of_test = 0;
  }
  try {
    test.body();
  } catch (const std::exception& error) {
    fail(test.file, 0, std::string(test.name) + " threw: " + error.what());
  } catch (...) {
    fail(test.file, 0, std::string(test.name) + " threw something that is no exception");
  }
  const std::lock_guard lock(mutex);
  if (failures_of_test > kMostPrinted) std::printf("... %zu failures in all\n", failures_of_test);
  return failures_of_test == 0;
}

int run_all(const char* filter) {
  std::size_t passed = 0;
  std::size_t failed = 0;
  for (const Test& test : tests()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    const auto begin = std::chrono::steady_clock::now();
    const bool ok = run(test);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("%s %s (%.2f s)\n", ok ? "ok  " : "FAIL", test.name, seconds);
    std::fflush(stdout);
    ++(ok ? passed : failed);
  }
  if (passed + failed == 0) std::printf("no test has '%s' in its name\n", filter);
  std::printf("%zu passed, %zu failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace

}  // namespace dynswap::test

int main(int argc, char** argv) { return dynswap::test::run_all(argc > 1 ? argv[1] : ""); }
