// Short-lived groups: what a forward saves leaves the device, and comes back ahead of its use.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "core/engine.h"
#include "fake_device.h"
#include "sim/virtual_backend.h"

namespace dynswap::test {

namespace {

constexpr std::size_t kMiB = 1u << 20;

SourcePtr raw(std::size_t bytes, const std::byte* address = nullptr, const std::string& name = "w") {
  auto source = std::make_shared<Source>();
  source->name = name;
  source->count = bytes;
  source->address = address;
  return source;
}

/// Layers of one weight each, and what each saves for backward.
struct Trained {
  Trained(std::size_t layers, std::size_t saved_bytes, std::size_t limit) : sizes(layers, saved_bytes) {
    auto backend = std::make_unique<sim::VirtualBackend>(1e9, 0);
    clock = backend.get();
    EngineOptions options;
    options.short_lived_bytes = limit;
    engine = std::make_shared<Engine>(std::move(backend), options);
    for (std::size_t i = 0; i < layers; ++i) weights.push_back(engine->add_weight(raw(8 * kMiB), i));
    engine->plan();
  }

  /// A forward and a backward. The last `kept` saved tensors do not leave the device.
  void step(std::size_t kept = 0) {
    std::vector<WeightId> saved;
    std::size_t on_device = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      {
        const Lease lease = engine->acquire(weights[i], 0);
        clock->kernel(1);
      }
      saved.push_back(*engine->take_short_lived());
      if (i + kept < weights.size()) {
        engine->offer(saved.back(), raw(sizes[i]), nullptr);
      } else {
        engine->note_kept(on_device += sizes[i]);
      }
    }
    for (std::size_t i = weights.size(); i-- > 0;) {
      if (i + kept < weights.size()) {
        const Lease lease = engine->acquire(saved[i], 0);
        const Lease weight = engine->acquire(weights[i], 0);
        clock->kernel(2);
      } else {
        engine->pass_by(saved[i], {});
        const Lease weight = engine->acquire(weights[i], 0);
        clock->kernel(2);
        engine->note_kept(on_device -= sizes[i]);
      }
      engine->give_back_short_lived(saved[i]);
    }
  }

  std::vector<std::size_t> sizes;
  sim::VirtualBackend* clock = nullptr;
  std::shared_ptr<Engine> engine;
  std::vector<WeightId> weights;
};

}  // namespace

TEST(short_lived_groups_are_fetched_ahead_in_the_order_of_the_step_before) {
  for (const std::size_t kept : {1u, 3u}) {
    Trained model(12, 4 * kMiB, 16 * kMiB);
    for (int i = 0; i < 2; ++i) model.step(kept);
    model.engine->reset_counters();
    for (int i = 0; i < 3; ++i) model.step(kept);
    const Stats stats = model.engine->stats();
    EXPECT_EQ(stats.misses, 0u);
    EXPECT_EQ(stats.wasted_prefetches, 0u);
    EXPECT_EQ(stats.stall_ns, 0u);
    EXPECT(stats.bytes_moved >= 3 * (12 - kept) * 4 * kMiB);
  }
}

TEST(short_lived_groups_of_other_sizes_take_the_same_places) {
  Trained model(12, 4 * kMiB, 64 * kMiB);
  for (int i = 0; i < 2; ++i) model.step(1);
  model.engine->reset_counters();
  for (std::size_t i = 0; i < 12; ++i) model.sizes[i] = (i % 3 + 1) * kMiB;
  model.step(1);
  EXPECT_EQ(model.engine->stats().misses, 0u);
}

TEST(short_lived_groups_are_no_part_of_the_budget_and_have_one_report) {
  Trained model(6, 4 * kMiB, 8 * kMiB);
  const std::uint64_t planned = model.engine->stats().peak_bytes;
  for (int i = 0; i < 2; ++i) model.step();
  EXPECT_EQ(model.engine->stats().peak_bytes, planned);
  EXPECT_EQ(model.engine->stats().overflow_bytes, 0u);
  const std::vector<Engine::GroupReport> groups = model.engine->groups();
  EXPECT_EQ(groups.size(), 7u);
  EXPECT(groups.back().short_lived && groups.back().weights.empty());
  EXPECT_EQ(groups.back().bytes, 6 * 4 * kMiB);
  EXPECT_EQ(groups.back().figures.hits + groups.back().figures.misses, 2u * 6);
  const PriorPlan plan = model.engine->plan_for_reuse();
  EXPECT_EQ(plan.group_of.size(), 6u);
  EXPECT_EQ(plan.resident.size(), 6u);
  for (const GroupId group : plan.order) EXPECT(group < 6);
}

TEST(short_lived_copies_ahead_stay_within_their_limit) {
  auto device = std::make_shared<FakeDevice>(1);
  device->set_caching();
  EngineOptions options;
  options.short_lived_bytes = 3 * 4096;
  const auto engine = std::make_shared<Engine>(device->backend(), options);
  std::vector<std::vector<std::byte>> bytes(10, std::vector<std::byte>(4096, std::byte{7}));
  engine->plan();
  for (int step = 0; step < 3; ++step) {
    std::vector<WeightId> saved;
    for (const auto& each : bytes) {
      saved.push_back(*engine->take_short_lived());
      engine->offer(saved.back(), raw(each.size(), each.data()), nullptr);
    }
    for (std::size_t i = bytes.size(); i-- > 0;) {
      {
        const Lease lease = engine->acquire(saved[i], 0);
        device->kernel(0, lease.data(), std::make_shared<const std::vector<std::byte>>(bytes[i]), "saved");
      }
      engine->give_back_short_lived(saved[i]);
    }
    device->drain();
  }
  EXPECT(device->peak_bytes() <= 4 * 4096);
  EXPECT_EQ(engine->stats().misses, 10u + 2u);  // those of the first step, and the first of each other
  engine->close();
  for (const std::string& violation : device->violations()) fail(__FILE__, __LINE__, violation);
}

TEST(short_lived_weights_end_with_their_engine) {
  Trained model(3, 1 * kMiB, 2 * kMiB);
  const WeightId saved = *model.engine->take_short_lived();
  model.engine->offer(saved, raw(kMiB), nullptr);
  model.engine->close();
  EXPECT(!model.engine->take_short_lived());
  EXPECT_THROWS(model.engine->acquire(saved, 0), ClosedError);
  model.engine->give_back_short_lived(saved);
}

namespace {

/// Llama-3-8B in bfloat16 with LoRA, on a card that reaches 80 TFLOP/s and a bus of 25 GB/s either way. All
/// weights stream. What a layer saves: norms in float32, q, k, v, what attention returns, and the MLP's.
struct Llama {
  static constexpr double kFlops = 80e12, kBus = 25e9;
  static constexpr std::size_t kLayers = 32, kHidden = 4096, kMlp = 14336, kKeys = 1024;
  static constexpr std::size_t kLayerBytes = 2 * (2 * kHidden * (kHidden + kKeys) + 3 * kHidden * kMlp);

  explicit Llama(std::size_t tokens) {
    const auto n = static_cast<double>(tokens);
    const double linear = static_cast<double>(kLayerBytes) * n, attention = 2 * n * n * kHidden;
    forward = (linear + attention) / kFlops;
    backward = (linear + 2.5 * attention) / kFlops;  // weights are frozen: no gradients of them
    saved = tokens * (2 * 4 * kHidden + 2 * (2 * kHidden + 2 * kKeys) + 2 * 4 * kMlp);
  }

  double forward = 0, backward = 0;  ///< seconds of a layer
  std::size_t saved = 0;             ///< bytes of a layer
};

/// Its training under a limit, where what exceeds it leaves as SavedOffload has it leave: what was saved
/// first, on a stream of its own, and the consumer waits for the copies of which too many are under way.
struct TrainedLlama {
  static constexpr Stream kOut = 9;

  TrainedLlama(std::size_t tokens, std::size_t most) : model(tokens), limit(most) {
    auto backend = std::make_unique<sim::VirtualBackend>(Llama::kBus, 7e-6);
    clock = backend.get();
    EngineOptions options;
    options.short_lived_bytes = limit;
    options.budget = 4 * Llama::kLayerBytes;
    engine = std::make_shared<Engine>(std::move(backend), options);
    for (std::size_t i = 0; i < Llama::kLayers; ++i)
      weights.push_back(engine->add_weight(raw(Llama::kLayerBytes), i));
    engine->plan();
  }

  std::size_t leaving() const {
    const std::size_t stays = (limit - limit / 4) / model.saved;
    return Llama::kLayers - std::min(Llama::kLayers, stays);
  }

  void step() {
    struct Departing {
      WeightId id;
      EventPtr written;
    };
    std::vector<WeightId> saved;
    std::vector<Departing> departing;
    std::size_t kept = 0;
    const auto arrived = [&] {
      engine->offer(departing.front().id, raw(model.saved), departing.front().written);
      departing.erase(departing.begin());
    };
    for (std::size_t i = 0; i < Llama::kLayers; ++i) {
      {
        const Lease lease = engine->acquire(weights[i], 0);
        clock->kernel(model.forward);
      }
      saved.push_back(*engine->take_short_lived());
      if (i >= leaving()) {
        engine->note_kept(kept += model.saved);
        continue;
      }
      clock->wait(kOut, clock->record(0));
      clock->kernel(static_cast<double>(model.saved) / Llama::kBus, kOut);
      departing.push_back({saved.back(), clock->record(kOut)});
      while (!departing.empty() && departing.front().written->done()) arrived();
      while (departing.size() > 1 && departing.size() * model.saved > limit / 4) {
        clock->wait(0, departing.front().written);
        arrived();
      }
      most_kept = std::max(most_kept, kept + (departing.size() + 1) * model.saved);
    }
    while (!departing.empty()) arrived();
    for (std::size_t i = Llama::kLayers; i-- > 0;) {
      Lease lease;
      if (i < leaving()) {
        lease = engine->acquire(saved[i], 0);
      } else {
        engine->pass_by(saved[i], {});
      }
      const Lease weight = engine->acquire(weights[i], 0);
      clock->kernel(model.backward);
      lease.release();
      if (i >= leaving()) engine->note_kept(kept -= model.saved);
      engine->give_back_short_lived(saved[i]);
    }
  }

  /// The least that a step can take: in forward weights come in while saved tensors go out, in backward both
  /// come in.
  double least() const {
    const auto layers = static_cast<double>(Llama::kLayers);
    const double weight_bytes = layers * static_cast<double>(Llama::kLayerBytes);
    const double saved_bytes = static_cast<double>(leaving() * model.saved);
    return std::max({layers * model.forward, weight_bytes / Llama::kBus, saved_bytes / Llama::kBus}) +
           std::max(layers * model.backward, (weight_bytes + saved_bytes) / Llama::kBus);
  }

  const Llama model;
  const std::size_t limit;
  std::size_t most_kept = 0;
  sim::VirtualBackend* clock = nullptr;
  std::shared_ptr<Engine> engine;
  std::vector<WeightId> weights;
};

}  // namespace

TEST(weights_and_saved_tensors_share_the_bus_to_its_limit) {
  struct Case {
    std::size_t tokens, limit_gib;
  };
  for (const auto& [tokens, limit_gib] : {Case{4096, 4}, Case{4096, 12}, Case{32768, 16}, Case{32768, 24}}) {
    TrainedLlama model(tokens, limit_gib << 30);
    for (int i = 0; i < 3; ++i) model.step();
    const double before = model.clock->seconds();
    model.engine->reset_counters();
    constexpr int kSteps = 4;
    for (int i = 0; i < kSteps; ++i) model.step();
    const double seconds = (model.clock->seconds() - before) / kSteps, ratio = seconds / model.least();
    std::printf("  %zu tokens, %zu GiB: %.3f s a step, %.3f of the least\n", tokens, limit_gib, seconds,
                ratio);
    EXPECT(ratio <= 1.05);
    EXPECT_EQ(model.engine->stats().misses, 0u);
  }
}

}  // namespace dynswap::test
