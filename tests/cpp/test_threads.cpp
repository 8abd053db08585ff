// Several real threads on one engine. (What the fake device cannot show: the engine's own locking; run it
// under ThreadSanitizer.) The consumers are the threads themselves, so each reads what it was handed.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "host/host_backend.h"
#include "random.h"
#include "versioned_masters.h"

namespace dynswap::test {

namespace {

constexpr std::size_t kWeights = 24;
constexpr int kThreads = 4;
constexpr int kLeastPasses = 20;
constexpr std::uint32_t kReplacements = 500;

void no_cast(void*, Scalar, const void*, Scalar, std::size_t) {}

struct Model {
  explicit Model(std::unique_ptr<Backend> backend) {
    EngineOptions options;
    options.group_bytes = 0;
    options.prefetch = 2;
    options.budget = 16 * kWeightBytes;
    engine = std::make_shared<Engine>(std::move(backend), options);
    for (std::uint32_t i = 0; i < kWeights; ++i) ids.push_back(engine->add_weight(versioned_source(i, 0), i));
    engine->plan();
  }

  /// Reads a weight through a lease: all words of one version, at least as new as when it was asked for.
  Lease read(std::uint32_t weight, Stream stream) {
    const std::uint32_t least = versions[weight].load();
    Lease lease = engine->acquire(ids[weight], stream);
    check(lease, weight, least);
    return lease;
  }

  void check(const Lease& lease, std::uint32_t weight, std::uint32_t least) {
    if (!holds_version(lease, weight, least)) ++wrong;
  }

  std::shared_ptr<Engine> engine;
  std::vector<WeightId> ids;
  std::array<std::atomic<std::uint32_t>, kWeights> versions{};  ///< known to be in the engine
  std::atomic<std::uint64_t> wrong{0};
};

/// Passes in an order of its own, with tensors kept over some modules, until told to stop.
void consume(Model& model, Stream stream, const std::atomic<bool>& stop) {
  Random random(stream + 1);
  std::vector<std::pair<std::uint32_t, Lease>> kept;
  for (int pass = 0; pass < kLeastPasses || !stop; ++pass) {
    const bool backwards = random.chance(0.2);
    for (std::uint32_t i = 0; i < kWeights; ++i) {
      const std::uint32_t weight = backwards ? kWeights - 1 - i : i;
      if (random.chance(0.1)) continue;
      Lease lease = model.read(weight, stream);
      if (random.chance(0.1)) kept.emplace_back(weight, std::move(lease));
      if (!kept.empty() && random.chance(0.15)) {
        const std::size_t at = random.below(kept.size());
        model.check(kept[at].second, kept[at].first, 0);  // still the same bytes
        kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
  }
}

void replace_masters(Model& model) {
  Random random(99);
  for (std::uint32_t version = 1; version <= kReplacements; ++version) {
    const auto weight = static_cast<std::uint32_t>(random.below(kWeights));
    model.engine->update_source(model.ids[weight], versioned_source(weight, version));
    model.versions[weight].store(version);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void run(Model& model) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { consume(model, static_cast<Stream>(i), stop); });
  }
  std::thread watcher([&] {
    while (!stop) {
      if (model.engine->stats().live_leases > 10000) ++model.wrong;
      std::this_thread::yield();
    }
  });
  replace_masters(model);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  watcher.join();
  EXPECT_EQ(model.wrong.load(), 0u);
  EXPECT_EQ(model.engine->stats().live_leases, 0u);
  EXPECT(model.engine->stats().refetches > 0);
}

}  // namespace

TEST(threads_share_an_engine) {
  Model model(std::make_unique<ImmediateBackend>());
  run(model);
}

TEST(threads_share_an_engine_over_the_host_backend) {
  Model model(std::make_unique<HostBackend>(&no_cast, 2));
  run(model);
}

TEST(threads_close_under_consumers) {
  // Uninstalled by one thread while others are in a forward: an error there, and nothing else.
  for (int round = 0; round < 20; ++round) {
    Model model(std::make_unique<HostBackend>(&no_cast, 2));
    const std::atomic<bool> never{false};
    std::atomic<int> refused{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        try {
          consume(model, static_cast<Stream>(i), never);
        } catch (const Error&) {
          ++refused;
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    model.engine->close();
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(refused.load(), kThreads);
    EXPECT_EQ(model.wrong.load(), 0u);
  }
}

}  // namespace dynswap::test
