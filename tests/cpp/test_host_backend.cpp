// HostBackend: what it brings, and in which order.
#include "host/host_backend.h"

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "random.h"
#include "stopped_host.h"
#include "system.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

TEST(host_brings_ram_and_files) {
  HostBackend backend(&Gate::cast, 3);
  EXPECT_EQ(std::string(backend.name()), "host");
  TempFile written(40u << 20);
  evict(written.path());
  const auto file = File::open(written.path());
  const auto ram = random_bytes(20u << 20, 9);
  const Memory slot = backend.allocate(64u << 20);

  CopyRequest group;
  std::byte* next = slot.get();
  std::vector<std::pair<std::byte*, std::vector<std::byte>>> expected;
  const auto add = [&](SourcePtr source, const std::byte* bytes) {
    // A step brings a part only, and the first and last element apart.
    const std::size_t element = scalar_size(source->stored);
    const std::uint64_t count = source->count;
    const std::size_t begin = static_cast<std::size_t>(next - slot.get());
    if (const auto phase = backend.traits().phase(*source)) {
      next += (backend.traits().alignment + *phase - begin % backend.traits().alignment) %
              backend.traits().alignment;
    }
    std::vector<std::byte> result(source->wanted_bytes());
    if (source->cast()) {
      Gate::cast(result.data(), source->wanted, bytes, source->stored, count);
    } else {
      std::memcpy(result.data(), bytes, count * element);
    }
    const std::size_t wanted = scalar_size(source->wanted);
    group.steps.push_back({{}, {{source, 0, 1, next}}});
    if (count > 2) group.steps.back().pieces.push_back({source, 1, count - 2, next + wanted});
    group.steps.push_back({{}, {{source, count - 1, 1, next + (count - 1) * wanted}}});
    next += (result.size() + 63) / 64 * 64;
    expected.emplace_back(group.steps[group.steps.size() - 2].pieces[0].dst, std::move(result));
  };
  add(file_source(file, 64, 17u << 20), written.at(64));  // in place
  add(file_source(file, 8, 9u << 20), written.at(8));     // not in place
  add(file_source(file, 24u << 20, 2u << 20, Scalar::f32, Scalar::bf16), written.at(24u << 20));
  add(file_source(file, 1u << 20, 300), written.at(1u << 20));         // small
  add(file_source(file, 35u << 20, 5u << 20), written.at(35u << 20));  // to the end
  add(ram_source(ram.data(), 10u << 20, Scalar::raw8, Scalar::raw8), ram.data());
  add(ram_source(ram.data(), 2u << 20, Scalar::f64, Scalar::f16), ram.data());
  const EventPtr copied = backend.copy(std::move(group));
  backend.wait(0, copied);
  EXPECT(copied->done());
  for (const auto& [place, bytes] : expected) EXPECT(std::memcmp(place, bytes.data(), bytes.size()) == 0);
  EXPECT(backend.record(0) == nullptr);
  EXPECT_EQ(backend.host_synchronisations(), 0);
  backend.wait(0, nullptr);
  backend.wait(0, backend.copy({}));  // nothing to do
}

TEST(host_phase_lets_the_disk_write_into_place) {
  HostBackend backend(&Gate::cast, 1);
  const TempFile written(100);
  const auto file = File::open(written.path());
  EXPECT_EQ(backend.traits().alignment, 4096);
  EXPECT(backend.traits().phase(*file_source(file, 4096 * 5 + 192, 64u << 10)) == std::size_t{192});
  EXPECT(backend.traits().phase(*file_source(file, 4096 * 5, 64u << 10)) == std::size_t{0});
  EXPECT(!backend.traits().phase(*file_source(file, 4096 * 5 + 8, 64u << 10)));  // tensors begin at 64 bytes
  EXPECT(!backend.traits().phase(*file_source(file, 192, (64u << 10) - 1)));     // small
  EXPECT(!backend.traits().phase(*file_source(file, 192, 1u << 20, Scalar::f32, Scalar::bf16)));
  EXPECT(!backend.traits().phase(*ram_source(written.at(0), 1u << 20, Scalar::raw8, Scalar::raw8)));
}

TEST(host_memory) {
  HostBackend backend(&Gate::cast, 1);
  Memory memory = backend.allocate((5u << 20) + 1);
  std::byte* const address = memory.get();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(address) % backend.traits().alignment, 0);
  std::memset(address, 1, (5u << 20) + 1);
  Memory second = memory;
  memory.reset();
  EXPECT(has_memory(address));
  second.reset();
  EXPECT(!has_memory(address));
  EXPECT(backend.allocate(0) != nullptr);
  EXPECT_THROWS(backend.allocate(std::size_t{1} << 60), OutOfMemory);
  EXPECT_THROWS(backend.allocate(~std::size_t{0}), OutOfMemory);
  EXPECT(contains(message_of([&] { backend.allocate(std::size_t{1} << 60); }), "1152921504606846976 bytes"));
}

TEST(host_demanded_copies_go_first) {
  Stopped host;
  std::vector<EventPtr> events{host.noted(1), host.noted(2), host.noted(3, {}, true), host.noted(4)};
  events.push_back(host.noted(5, {}, true));
  Gate::open();
  for (const EventPtr& event : events) host.backend.synchronise(event);
  EXPECT(Gate::order() == std::vector<int>({3, 5, 1, 2, 4}));
}

TEST(host_demanded_copies_pull_what_they_wait_for) {
  Stopped host;
  const EventPtr first = host.noted(1);
  const EventPtr second = host.noted(2);
  const EventPtr third = host.noted(3, {second});
  const EventPtr fourth = host.noted(4, {third}, true);
  Gate::open();
  host.backend.synchronise(fourth);
  host.backend.synchronise(first);
  EXPECT(Gate::order() == std::vector<int>({2, 3, 4, 1}));
}

TEST(host_wait_pulls_the_copy_forward) {
  Stopped host;
  const EventPtr first = host.noted(1);
  const EventPtr second = host.noted(2);
  const EventPtr third = host.noted(3, {second});
  std::thread waiter([&] { host.backend.wait(0, third); });
  // The gate opens when the waiter has had time to pull.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  Gate::open();
  waiter.join();
  host.backend.wait(0, first);
  EXPECT(Gate::order() == std::vector<int>({2, 3, 1}));
}

TEST(host_steps_wait_for_their_events) {
  Stopped host;
  // Both steps wait, for different copies; the copy is over only after both.
  const EventPtr a = host.noted(1, {host.gate});
  const EventPtr b = host.noted(2, {a});
  auto bytes = std::make_shared<std::vector<std::byte>>(8, std::byte{3});
  std::uint32_t slots[2] = {};
  CopyRequest split;
  for (int i = 0; i < 2; ++i) {
    split.steps.push_back({{i == 0 ? b : nullptr, i == 0 ? a : b},
                           {{ram_source(bytes->data(), 1, Scalar::f64, Scalar::f32, bytes), 0, 1,
                             reinterpret_cast<std::byte*>(&slots[i])}}});
  }
  split.demanded = true;
  const EventPtr last = host.backend.copy(std::move(split));
  // A step without pieces is a wait all the same.
  CopyRequest empty;
  empty.steps.push_back({{last}, {}});
  const EventPtr after = host.backend.copy(std::move(empty));
  EXPECT(!a->done() && !b->done() && !last->done() && !after->done());
  Gate::open();
  host.backend.wait(0, after);
  EXPECT(a->done() && b->done() && last->done());
  EXPECT(Gate::order() == std::vector<int>({1, 2, 3, 3}));
}

TEST(host_long_chains_need_one_thread) {
  // Were a worker to wait for an event, the first link would stop the pool.
  Stopped host;
  EventPtr link = host.gate;
  std::vector<int> expected;
  for (int i = 1; i <= 250; ++i) {
    link = host.noted(i, {link}, i % 2 == 0);
    expected.push_back(i);
  }
  Gate::open();
  host.backend.wait(0, link);
  EXPECT(Gate::order() == expected);
}

TEST(host_many_threads_share_slots) {
  // Each slot is written again and again, each time after the copy before, and holds the latest at the end.
  constexpr int kThreads = 4, kSlots = 3, kCopies = 60;
  constexpr std::size_t kBytes = 300000;
  HostBackend backend(&Gate::cast, 3);
  TempFile written(2u << 20);
  const auto file = File::open(written.path());
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<std::uint64_t>(t));
      std::vector<std::vector<std::byte>> slots(kSlots, std::vector<std::byte>(kBytes));
      std::vector<EventPtr> latest(kSlots);
      std::vector<std::uint64_t> from(kSlots);
      for (int i = 0; i < kCopies; ++i) {
        const std::size_t slot = random.below(kSlots);
        from[slot] = random.below((2u << 20) - kBytes);
        CopyRequest copy = request(file_source(file, from[slot], kBytes), slots[slot].data(), {latest[slot]},
                                   random.chance(0.3));
        if (random.chance(0.3)) copy.steps.front().after.push_back(latest[random.below(kSlots)]);
        latest[slot] = backend.copy(std::move(copy));
        if (random.chance(0.2)) {
          backend.wait(0, latest[slot]);
          EXPECT(std::memcmp(slots[slot].data(), written.at(from[slot]), kBytes) == 0);
        }
      }
      for (int slot = 0; slot < kSlots; ++slot) {
        if (!latest[slot]) continue;
        backend.wait(0, latest[slot]);
        EXPECT(std::memcmp(slots[slot].data(), written.at(from[slot]), kBytes) == 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
