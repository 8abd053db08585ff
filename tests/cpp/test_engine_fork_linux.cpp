// Forks while other threads are inside engines: Note [A fork waits for engines].
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "versioned_masters.h"

namespace dynswap::test {

namespace {

constexpr std::uint32_t kWeights = 12;

struct Model {
  Model() {
    EngineOptions options;
    options.group_bytes = 0;
    options.budget = 6 * kWeightBytes;
    engine = std::make_shared<Engine>(std::make_unique<ImmediateBackend>(), options);
    for (std::uint32_t i = 0; i < kWeights; ++i) ids.push_back(engine->add_weight(versioned_source(i, 0), i));
    engine->plan();
  }
  std::shared_ptr<Engine> engine;
  std::vector<WeightId> ids;
};

}  // namespace

TEST(engine_in_a_forked_child_waits_for_no_thread_of_the_parent) {
  Model model;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (Stream stream = 0; stream < 2; ++stream) {
    threads.emplace_back([&, stream] {
      while (!stop) {
        for (const WeightId id : model.ids) {
          const Lease lease = model.engine->acquire(id, stream);
          static_cast<void>(model.engine->groups());
        }
      }
    });
  }
  int ended = 0;
#ifdef __SANITIZE_ADDRESS__  // whose shadow memory makes a fork take 200 ms
  constexpr int kForks = 50;
#else
  constexpr int kForks = 500;
#endif
  for (; ended < kForks; ++ended) {
    Lease lease = model.engine->acquire(model.ids[0], 2);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      const bool held = model.engine->stats().live_leases > 0;
      bool refused = false;
      try {
        model.engine->acquire(model.ids[1], 2);
      } catch (const Error&) {
        refused = true;  // the engine is the parent's
      }
      lease.release();
      model.engine.reset();
      ::_exit(held && refused ? 0 : 1);
    }
    int status = -1;
    const bool waited = child > 0 && ::waitpid(child, &status, 0) == child;
    if (waited && WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    fail(__FILE__, __LINE__,
         child < 0 ? std::string("no fork: ") + std::strerror(errno) : "status " + std::to_string(status));
    break;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ended, kForks);
  EXPECT_EQ(model.engine->stats().live_leases, 0u);
}

}  // namespace dynswap::test
