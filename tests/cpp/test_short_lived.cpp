// Short-lived groups: what a forward saves leaves the device, and comes back ahead of its use.
#include <algorithm>
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

TEST(short_lived_groups_are_no_part_of_the_budget_nor_of_reports) {
  Trained model(6, 4 * kMiB, 8 * kMiB);
  const std::uint64_t planned = model.engine->stats().peak_bytes;
  for (int i = 0; i < 2; ++i) model.step();
  EXPECT_EQ(model.engine->stats().peak_bytes, planned);
  EXPECT_EQ(model.engine->stats().overflow_bytes, 0u);
  EXPECT_EQ(model.engine->groups().size(), 6u);
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

TEST(short_lived_groups_come_after_their_bytes_were_written) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
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
      device->host_write(/*stream=*/9, host.data(), host.size(), value);
      engine->offer(saved, raw(host.size(), host.data()), device_side.record(9));
      const auto expected = std::make_shared<const std::vector<std::byte>>(host.size(), value);
      {
        const Lease lease = engine->acquire(saved, 0);
        device->kernel(0, lease.data(), expected, "saved");
      }
      engine->give_back_short_lived(saved);
      device->drain();
    }
    engine->close();
    for (const std::string& violation : device->violations()) fail(__FILE__, __LINE__, violation);
  }
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

}  // namespace dynswap::test
