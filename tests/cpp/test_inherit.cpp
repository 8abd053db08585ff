// Residents that go from plan to plan, in small programs. (Races: random_program.cpp.)
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
constexpr double kBus = 1e9;

/// Of every weight that the fake device reads.
const std::vector<std::byte> kBytes(1 << 16);

/// A model whose weights have names, by which plans know each other's.
struct Plan {
  using Weights = std::vector<std::pair<std::string, std::size_t>>;

  Plan(const Weights& weights, EngineOptions options, WeightOptions of_each = {}) {
    auto backend = std::make_unique<sim::VirtualBackend>(kBus, 0);
    clock = backend.get();
    engine = std::make_shared<Engine>(std::move(backend), options);
    add(weights, of_each);
  }
  Plan(const Weights& weights, EngineOptions options, const std::shared_ptr<FakeDevice>& device)
      : engine(std::make_shared<Engine>(device->backend(), options)) {
    add(weights, {});
  }

  void add(const Weights& weights, WeightOptions options) {
    for (const auto& [name, bytes] : weights) {
      auto source = std::make_shared<Source>();
      source->name = name;
      source->count = bytes;
      source->address = kBytes.data();
      engine->add_weight(source, names.size(), options);
      names.push_back(name);
    }
  }

  std::optional<WeightId> id(const std::string& name) const {
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (names[i] == name) return static_cast<WeightId>(i);
    }
    return std::nullopt;
  }

  /// Takes the place of `earlier`; the masters of `changed` have changed.
  void follow(Plan& earlier, const std::vector<std::string>& changed = {}) {
    std::vector<std::vector<WeightId>> there;
    for (const std::vector<WeightId>& group : earlier.engine->residents_on_device()) {
      std::vector<WeightId>& ids = there.emplace_back();
      for (const WeightId id_there : group) {
        if (const auto own = id(earlier.names[id_there])) ids.push_back(*own);
      }
      if (ids.size() != group.size()) there.pop_back();
    }
    engine->arrange(there);
    std::vector<std::optional<WeightId>> ids;
    for (const std::string& name : names) ids.push_back(earlier.id(name));
    for (const std::string& name : changed) ids[*id(name)].reset();
    engine->inherit(*earlier.engine, ids);
    earlier.engine->close();
    engine->plan();
  }

  void begin() {
    engine->plan();
    pass();
  }
  void pass() {
    for (std::size_t i = 0; i < names.size(); ++i) {
      const Lease lease = engine->acquire(static_cast<WeightId>(i), 0);
      if (clock != nullptr) clock->kernel(1);
    }
  }
  /// What one more pass moves.
  std::uint64_t moved() {
    const std::uint64_t before = engine->stats().bytes_moved;
    pass();
    return engine->stats().bytes_moved - before;
  }

  std::vector<std::string> residents() const {
    std::vector<std::string> resident;
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (engine->resident(static_cast<WeightId>(i))) resident.push_back(names[i]);
    }
    return resident;
  }
  /// How many of these have been moved.
  std::size_t moved_of(const std::vector<std::string>& weights) const {
    const std::vector<Engine::GroupReport> groups = engine->groups();
    return static_cast<std::size_t>(std::count_if(weights.begin(), weights.end(), [&](const auto& name) {
      return std::any_of(groups.begin(), groups.end(), [&](const Engine::GroupReport& group) {
        return group.figures.copies > 0 &&
               std::count(group.weights.begin(), group.weights.end(), *id(name)) > 0;
      });
    }));
  }

  sim::VirtualBackend* clock = nullptr;
  std::shared_ptr<Engine> engine;
  std::vector<std::string> names;
};

constexpr std::size_t kLayers = 12;

/// Layers of 8 MiB; `adapters` of each, after its weight, of `bytes`.
Plan::Weights layers(const std::vector<std::string>& adapters = {}, std::size_t bytes = kMiB) {
  Plan::Weights weights;
  for (std::size_t i = 0; i < kLayers; ++i) {
    const std::string layer = "layer " + std::to_string(i);
    weights.emplace_back(layer, 8 * kMiB);
    for (const std::string& adapter : adapters) weights.emplace_back(layer + "." + adapter, bytes);
  }
  return weights;
}

EngineOptions with_budget(std::size_t budget) {
  EngineOptions options;
  options.budget = budget;
  return options;
}

}  // namespace

TEST(inherit_what_is_resident_is_not_moved_again) {
  const EngineOptions options = with_budget(200 * kMiB);
  Plan plain(layers(), options), red(layers({"red"}), options), both(layers({"red", "blue"}), options),
      again(layers(), options);
  plain.begin();
  red.follow(plain);
  EXPECT_EQ(red.moved(), kLayers * kMiB);  // the adapter
  EXPECT_EQ(red.moved(), 0u);
  both.follow(red);
  EXPECT_EQ(both.moved(), kLayers * kMiB);
  again.follow(both);
  EXPECT_EQ(again.moved(), 0u);
  EXPECT_EQ(again.engine->stats().resident_bytes, kLayers * 8 * kMiB);
  EXPECT_EQ(again.engine->stats().peak_bytes, kLayers * 8 * kMiB);
}

TEST(inherit_a_small_budget_keeps_its_residents) {
  // But for one, where the streamed groups, which the adapter makes larger, need its room.
  for (const std::size_t budget : {40u, 56u, 73u, 90u}) {
    for (const std::size_t bytes : {std::size_t{1} << 10, kMiB / 4, kMiB}) {
      const EngineOptions options = with_budget(budget * kMiB);
      Plan plain(layers(), options), red(layers({"red"}, bytes), options), again(layers(), options);
      plain.begin();
      const std::vector<std::string> before = plain.residents();
      red.follow(plain);
      const std::uint64_t first = red.moved(), steady = red.moved();
      EXPECT(red.moved_of(before) <= 1);
      // What comes once is the adapter, if it stays; and the first pass runs ahead.
      EXPECT(first <= steady + kLayers * bytes + red.engine->stats().arena_bytes);
      EXPECT(red.engine->stats().peak_bytes <= budget * kMiB);
      again.follow(red);
      again.pass();
      EXPECT(again.moved_of(before) <= 1);
      EXPECT(again.engine->stats().peak_bytes <= budget * kMiB);
    }
  }
}

TEST(inherit_leaves_out_changed_held_and_unread_residents) {
  const EngineOptions options = with_budget(200 * kMiB);
  {
    Plan plain(layers(), options), red(layers({"red"}), options);
    plain.begin();
    red.follow(plain, {"layer 3"});
    EXPECT_EQ(red.moved(), kLayers * kMiB + 8 * kMiB);
  }
  {
    Plan plain(layers(), options), red(layers({"red"}), options);
    plain.begin();
    const Lease held = plain.engine->acquire(*plain.id("layer 5"), 0);
    red.follow(plain);
    EXPECT_EQ(red.moved(), kLayers * kMiB + 8 * kMiB);
  }
  {
    Plan plain(layers(), options), red(layers({"red"}), options);
    plain.engine->plan();
    {
      const Lease first = plain.engine->acquire(0, 0);
    }  // the next ones are on their way
    red.follow(plain);
    EXPECT_EQ(red.moved(), kLayers * kMiB + 11 * 8 * kMiB);
  }
}

TEST(inherit_units_that_are_needed_at_once_stay_whole) {
  // Both weights of the unit were residents, in two groups; now they are needed together.
  const EngineOptions options = with_budget(200 * kMiB);
  Plan plain({{"a", 8 * kMiB}, {"b", 8 * kMiB}, {"c", 8 * kMiB}}, options);
  plain.begin();
  const auto backend = [] { return std::make_unique<sim::VirtualBackend>(kBus, 0); };
  const auto engine = std::make_shared<Engine>(backend(), options);
  for (const std::uint64_t unit : {0, 0, 1}) {
    auto source = std::make_shared<Source>();
    source->count = 8 * kMiB;
    engine->add_weight(source, unit, {.at_once = true});
  }
  engine->arrange({{0}, {1}, {2}});
  engine->inherit(*plain.engine, {0, 1, 2});
  plain.engine->close();
  engine->plan();
  EXPECT_EQ(engine->companions(0).size(), 2u);
  EXPECT_EQ(engine->stats().resident_groups, 2u);
  for (WeightId id = 0; id < 3; ++id) static_cast<void>(engine->acquire(id, 0));
  EXPECT_EQ(engine->stats().bytes_moved, 16 * kMiB);
}

TEST(inherit_an_inherited_resident_is_gone_for_the_earlier_plan) {
  Plan plain(layers(), with_budget(200 * kMiB)), red(layers({"red"}), with_budget(200 * kMiB));
  plain.begin();
  red.engine->arrange(plain.engine->residents_on_device());  // not its ids: none of these stays together
  std::vector<std::optional<WeightId>> ids;
  for (const std::string& name : red.names) ids.push_back(plain.id(name));
  red.engine->inherit(*plain.engine, ids);
  EXPECT_THROWS(plain.engine->acquire(0, 0), ClosedError);
  EXPECT(!plain.engine->acquire_present(0, 0, /*in_order=*/false));
}

TEST(inherit_frees_its_memory_if_planning_fails) {
  const auto device = std::make_shared<FakeDevice>(7);
  EngineOptions options = with_budget(1 << 20);
  Plan plain({{"a", 4096}, {"b", 4096}}, options, device),
      red({{"a", 4096}, {"b", 4096}, {"c", 8192}}, options, device);
  plain.begin();
  device->drain();
  device->set_failures(0, 1000);
  EXPECT_THROWS(red.follow(plain), OutOfMemory);
  device->drain();
  plain.engine.reset();
  EXPECT_EQ(device->live_bytes(), 0u);
  EXPECT(device->violations().empty());
}

}  // namespace dynswap::test
