// The CUDA backend over the pretend device: which bytes arrive, in what order, and
// what it asks of the driver.
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "cuda_fixture.h"
#include "io/file.h"
#include "pretend_gpu.h"
#include "random.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::array kFloating{Scalar::f64,  Scalar::f32,       Scalar::f16,
                               Scalar::bf16, Scalar::f8_e4m3fn, Scalar::f8_e5m2};

SourcePtr in_ram(std::uint64_t count, Scalar stored, Scalar wanted, std::uint64_t seed) {
  auto source = std::make_shared<Source>();
  auto bytes = std::make_shared<std::vector<std::byte>>(random_bytes(count * scalar_size(stored), seed));
  source->name = "ram.weight";
  source->stored = stored;
  source->wanted = wanted;
  source->count = count;
  source->address = bytes->data();
  source->owner = std::move(bytes);
  return source;
}

SourcePtr in_file(const TempFile& file, std::uint64_t offset, std::uint64_t count, Scalar stored,
                  Scalar wanted) {
  auto source = std::make_shared<Source>();
  source->name = "file.weight";
  source->stored = stored;
  source->wanted = wanted;
  source->count = count;
  source->file = File::open(file.path());
  source->offset = offset;
  return source;
}

/// What has to be on the device.
std::vector<std::byte> expected(const Source& source, const std::byte* stored) {
  std::vector<std::byte> bytes(source.wanted_bytes());
  if (source.cast()) {
    gpu::cast(bytes.data(), source.wanted, stored, source.stored, source.count);
  } else {
    std::memcpy(bytes.data(), stored, bytes.size());
  }
  return bytes;
}

void expect_arrives(Fixture& fixture, const SourcePtr& source, const std::byte* stored) {
  const Consumer consumer;
  const gpu::Block device(source->wanted_bytes());
  const EventPtr copied = fixture.backend->copy(whole(source, device.data()));
  fixture.backend->wait(consumer.stream(), copied);
  bool same = false;
  consumer.enqueue([&] { same = device == expected(*source, stored); });
  consumer.finish();
  EXPECT(same);
}

TEST(cuda_pinned_is_copied_straight_from_the_master) {
  Fixture fixture;
  const SourcePtr source = fixture.pinned(in_ram(3u << 20, Scalar::raw8, Scalar::raw8, 1));
  expect_arrives(fixture, source, source->address);
  EXPECT_EQ(gpu::counts().host_functions, 0u);
  EXPECT_EQ(fixture.backend->host_synchronisations(), 0u);
}

TEST(cuda_every_cast_from_every_kind_of_source) {
  Fixture fixture;
  const TempFile file(5u << 20, 7);
  for (const Scalar stored : kFloating) {
    for (const Scalar wanted : kFloating) {
      const SourcePtr ram = in_ram(70'001, stored, wanted, 3);
      expect_arrives(fixture, ram, ram->address);
      const SourcePtr pinned = fixture.pinned(in_ram(70'001, stored, wanted, 4));
      expect_arrives(fixture, pinned, pinned->address);
      const std::uint64_t offset = 8 * 13;
      expect_arrives(fixture, in_file(file, offset, 200'003, stored, wanted), file.at(offset));
    }
  }
  EXPECT(gpu::counts().kernels > 0);
}

TEST(cuda_a_weight_larger_than_the_whole_ring) {
  Fixture fixture;
  const SourcePtr source = in_ram(11'000'003, Scalar::raw8, Scalar::raw8, 5);
  expect_arrives(fixture, source, source->address);
  const SourcePtr cast = in_ram(2'500'001, Scalar::f16, Scalar::f32, 5);
  expect_arrives(fixture, cast, cast->address);
  const SourcePtr wide = in_ram(300'001, Scalar::raw128, Scalar::raw128, 5);
  expect_arrives(fixture, wide, wide->address);
  EXPECT_EQ(fixture.backend->host_synchronisations(), 0u);
}

TEST(cuda_a_cast_larger_than_the_scratch_block) {
  Fixture fixture;
  const SourcePtr source = fixture.pinned(in_ram(9'000'001, Scalar::f32, Scalar::bf16, 6));
  expect_arrives(fixture, source, source->address);
  EXPECT_EQ(gpu::counts().kernels, 3u);  // of 36 MB in blocks of 16 MiB
}

/// Many small weights, read or copied as one.
void many_small(Fixture& fixture, bool pinned) {
  std::vector<SourcePtr> sources;
  std::size_t bytes = 0;
  for (std::uint64_t i = 0; i < 40; ++i) {
    sources.push_back(in_ram(100 + 37 * i, Scalar::f32, i % 5 == 4 ? Scalar::f16 : Scalar::f32, i));
    bytes += sources.back()->wanted_bytes();
  }
  if (pinned) fixture.lock(sources);
  const gpu::Block device(bytes);
  CopyRequest request;
  request.steps.emplace_back();
  for (std::byte* dst = device.data(); const SourcePtr& source : sources) {
    request.steps[0].pieces.push_back({source, 0, source->count, dst});
    dst += source->wanted_bytes();
  }
  const Consumer consumer;
  fixture.backend->wait(consumer.stream(), fixture.backend->copy(std::move(request)));
  consumer.enqueue([&] {
    for (const std::byte* at = gpu::bytes_at(device.data()); const SourcePtr& source : sources) {
      EXPECT(std::memcmp(at, expected(*source, source->address).data(), source->wanted_bytes()) == 0);
      at += source->wanted_bytes();
    }
  });
  consumer.finish();
}

TEST(cuda_small_pinned_weights_go_in_one_batch) {
  Fixture fixture;
  many_small(fixture, true);
  EXPECT_EQ(gpu::counts().batches, 1u);
}

TEST(cuda_a_small_pinned_master_is_copied_as_it_is_now) {
  Fixture fixture;
  for (const Scalar wanted : {Scalar::f32, Scalar::bf16}) {
    const SourcePtr source = fixture.pinned(in_ram(500, Scalar::f32, wanted, 3));
    EXPECT(source->pinned_copy);
    expect_arrives(fixture, source, source->address);
    // In silence: nobody is told.
    auto* const master = const_cast<std::byte*>(source->address);
    master[1999] = ~master[1999];
    expect_arrives(fixture, source, source->address);
  }
  EXPECT_EQ(gpu::counts().host_functions, 0u);
}

TEST(cuda_a_master_that_is_torn_is_refused_by_the_driver) {
  // The stand-in's own rule, on which the tests of pinning rest.
  Fixture fixture;
  const SourcePtr source = fixture.pinned(in_ram(100'000, Scalar::raw8, Scalar::raw8, 3));
  auto beyond = std::make_shared<Source>(*source);
  beyond->count += kPage;
  const gpu::Block device(beyond->count);
  EXPECT_THROWS(fixture.backend->copy(whole(beyond, device.data())), DeviceError);
}

TEST(cuda_small_staged_weights_share_a_buffer) {
  Fixture fixture;
  many_small(fixture, false);
  EXPECT_EQ(gpu::counts().host_functions, 2u);  // one buffer, and the end of the request
}

TEST(cuda_a_driver_without_batches) {
  Fixture fixture;
  gpu::faults().no_batches = true;
  many_small(fixture, true);
  many_small(fixture, true);
  EXPECT_EQ(gpu::counts().batches, 0u);
}

TEST(cuda_fresh_memory_waits_for_its_allocators_stream) {
  Fixture fixture(1, pretend::Order::late);
  const SourcePtr source = fixture.pinned(in_ram(4096, Scalar::raw8, Scalar::raw8, 8));
  // The caching allocator hands out a block that work of before still reads.
  fixture.cached_block = gpu::allocate(4096);
  std::byte* const block = gpu::bytes_at(fixture.cached_block.get());
  std::memset(block, static_cast<int>(~source->address[0]), 4096);
  bool overwritten = true;
  gpu::enqueue(fixture.allocation_stream, [&, old = ~source->address[0]] { overwritten = block[0] != old; });
  const Memory memory = fixture.backend->allocate(4096);
  const EventPtr copied = fixture.backend->copy(whole(source, memory.get()));
  fixture.backend->synchronise(copied);
  EXPECT(!overwritten);
  EXPECT(block[0] == source->address[0]);
  EXPECT_EQ(fixture.backend->host_synchronisations(), 1u);
}

TEST(cuda_a_failing_read_is_thrown_by_wait_and_by_no_other) {
  Fixture fixture;
  TempFile file(4u << 20, 9);
  const SourcePtr good = in_ram(3u << 20, Scalar::raw8, Scalar::raw8, 9);
  const SourcePtr bad = in_file(file, 0, 4u << 20, Scalar::raw8, Scalar::raw8);
  file.truncate(1u << 20);
  const Consumer consumer;
  const gpu::Block device(4u << 20);
  const EventPtr failed = fixture.backend->copy(whole(bad, device.data()));
  EXPECT_THROWS(fixture.backend->wait(consumer.stream(), failed), SourceError);
  EXPECT_THROWS(fixture.backend->wait(consumer.stream(), failed), SourceError);
  fixture.backend->synchronise(failed);
  EXPECT(failed->done());
  expect_arrives(fixture, good, good->address);
}

TEST(cuda_a_refused_call_leaves_the_backend_usable) {
  for (int refused = 1; refused <= 4; ++refused) {
    for (const bool host_function : {false, true}) {
      Fixture fixture(static_cast<std::uint64_t>(refused));
      const SourcePtr source = in_ram(5'000'000, Scalar::f16, Scalar::f8_e5m2, 10);
      const SourcePtr other = in_ram(5'000'000, Scalar::raw8, Scalar::raw8, 11);
      const gpu::Block device(source->wanted_bytes());
      slow_readers = true;
      (host_function ? gpu::faults().fail_host_function : gpu::faults().fail_copy) = refused;
      EXPECT_THROWS(fixture.backend->copy(whole(source, device.data())), DeviceError);
      EXPECT(device.at_rest());  // nor to a buffer of the ring
      expect_arrives(fixture, other, other->address);
      slow_readers = false;
    }
  }
}

TEST(cuda_a_refused_call_among_pinned_copies) {
  Fixture fixture;
  gpu::faults().no_batches = true;
  gpu::faults().fail_copy = 2;
  const SourcePtr source = fixture.pinned(in_ram(8u << 20, Scalar::raw8, Scalar::raw8, 12));
  const gpu::Block device(8u << 20);
  const Consumer consumer;
  consumer.enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); });
  CopyRequest request = whole(source, device.data(), {fixture.backend->record(consumer.stream())});
  request.steps[0].pieces = {{source, 0, 6u << 20, device.data()},
                             {source, 6u << 20, 2u << 20, device.data()}};
  EXPECT_THROWS(fixture.backend->copy(std::move(request)), DeviceError);
  EXPECT(device.at_rest());  // the first copy, too
}

TEST(cuda_closing_with_copies_in_flight) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    Fixture fixture(seed);
    std::vector<gpu::Block> device;
    for (int i = 0; i < 8; ++i) device.emplace_back(5u << 18);
    const SourcePtr source = in_ram(5u << 18, Scalar::raw8, Scalar::raw8, seed);
    for (const gpu::Block& slot : device) fixture.backend->copy(whole(source, slot.data()));
    fixture.backend->close();
    for (const gpu::Block& slot : device) EXPECT(slot.at_rest());
    std::byte byte{};
    EXPECT_THROWS(fixture.backend->copy(whole(source, &byte)), Error);
  }
}

TEST(cuda_sources_live_until_their_copy_is_over) {
  Fixture fixture;
  const Consumer consumer;
  const gpu::Block device(1000);
  consumer.enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); });
  const EventPtr slot_is_free = fixture.backend->record(consumer.stream());
  std::weak_ptr<const Source> watched;
  EventPtr copied;
  {
    const SourcePtr source = fixture.pinned(in_ram(1000, Scalar::raw8, Scalar::raw8, 11));
    watched = source;
    copied = fixture.backend->copy(whole(source, device.data(), {slot_is_free}));
  }
  EXPECT(!watched.expired());
  fixture.backend->synchronise(copied);
  const SourcePtr other = in_ram(16, Scalar::raw8, Scalar::raw8, 11);
  const EventPtr later =
      fixture.backend->copy(whole(other, device.data()));  // issuing looks for what is over
  EXPECT(watched.expired());
  fixture.backend->synchronise(later);
}

/// Slots that are written again and again, read by "kernels" in between: a slot that is overwritten before
/// its reader, or read before its copy, shows a wrong byte.
void churn(Fixture& fixture, const std::vector<SourcePtr>& sources,
           const std::vector<std::vector<std::byte>>& right, std::uint64_t seed) {
  constexpr std::size_t kSlots = 3;
  Random random(seed);
  const std::array<Consumer, 2> consumers;
  const std::vector<gpu::Block> slots{gpu::Block(6u << 20), gpu::Block(6u << 20), gpu::Block(6u << 20)};
  std::array<EventPtr, kSlots> released;
  for (int i = 0; i < 60; ++i) {
    const std::size_t slot = random.below(kSlots);
    const std::size_t which = random.below(sources.size());
    const Consumer& consumer = consumers[random.below(consumers.size())];
    std::byte* const dst = slots[slot].data();
    const EventPtr copied = fixture.backend->copy(whole(sources[which], dst, {released[slot]}));
    fixture.backend->wait(consumer.stream(), copied);
    consumer.enqueue([&bytes = right[which], at = gpu::bytes_at(dst)] {
      EXPECT(std::memcmp(bytes.data(), at, bytes.size()) == 0);
    });
    released[slot] = fixture.backend->record(consumer.stream());
  }
  for (const Consumer& consumer : consumers) consumer.finish();
}

TEST(cuda_threads_that_copy_everything_at_once) {
#ifdef __SANITIZE_THREAD__  // sees a race that did not happen, too, and takes long
  constexpr std::uint64_t kSeeds = 2;
#else
  constexpr std::uint64_t kSeeds = 6;
#endif
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Fixture fixture(seed);
    const TempFile file(4u << 20, seed);
    std::vector<SourcePtr> sources{
        in_ram(2'700'001, Scalar::raw8, Scalar::raw8, 1),
        in_ram(300'001, Scalar::f32, Scalar::f16, 2),
        in_ram(300'001, Scalar::bf16, Scalar::f64, 3),
        in_file(file, 12, 1'000'000, Scalar::f16, Scalar::f16),
        in_file(file, 5120, 600'000, Scalar::f16, Scalar::f32),
        in_ram(400'000, Scalar::f16, Scalar::f8_e4m3fn, 4),
        fixture.pinned(in_ram(1'500'000, Scalar::f16, Scalar::f16, 5)),
        fixture.pinned(in_ram(500'000, Scalar::f32, Scalar::bf16, 6)),
    };
    std::vector<std::vector<std::byte>> right;
    for (const SourcePtr& source : sources) {
      right.push_back(expected(*source, source->file ? file.at(source->offset) : source->address));
    }
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] { churn(fixture, sources, right, 100 * seed + i); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(fixture.backend->host_synchronisations(), 0u);
  }
}

TEST(cuda_events_take_time_only_while_they_are_asked_to) {
  Fixture fixture;
  const Consumer consumer;
  const SourcePtr source = fixture.pinned(in_ram(1u << 20, Scalar::f32, Scalar::f32, 5));
  const gpu::Block device(source->wanted_bytes());
  const auto bring = [&] {
    const EventPtr copied = fixture.backend->copy(whole(source, device.data()));
    fixture.backend->wait(consumer.stream(), copied);
    return copied;
  };
  const EventPtr untimed = bring();
  consumer.finish();
  EXPECT(!untimed->when());
  EXPECT(!fixture.backend->mark(consumer.stream()));
  EXPECT_EQ(gpu::counts().timed_events, 0u);

  const std::int64_t begin = fixture.backend->now();
  fixture.backend->keep_times(true);
  const EventPtr before = fixture.backend->mark(consumer.stream());
  const EventPtr copied = bring();
  const EventPtr after = fixture.backend->mark(consumer.stream());
  consumer.finish();
  const auto from = before->when(), copy = copied->when(), to = after->when();
  EXPECT(from && copy && to);
  EXPECT(from->begin == from->end && to->begin == to->end);
  EXPECT(begin <= from->begin && copy->begin < copy->end && copy->end <= to->begin);
  // A float of milliseconds; and a thread that waits for a core reads the host's clock late.
  EXPECT(to->end <= fixture.backend->now() + 200'000'000);

  fixture.backend->keep_times(false);
  const std::size_t made = gpu::counts().timed_events;
  const EventPtr again = bring();
  consumer.finish();
  EXPECT(!again->when());
  EXPECT(copied->when());  // and it goes on knowing
  EXPECT_EQ(gpu::counts().timed_events, made);
}

/// In single-precision milliseconds the moments are a quarter of one apart then.
TEST(cuda_events_tell_how_long_a_copy_took_hours_after_they_began_to) {
  Fixture fixture;
  const Consumer consumer;
  const SourcePtr source = fixture.pinned(in_ram(1u << 10, Scalar::f32, Scalar::f32, 5));
  const gpu::Block device(source->wanted_bytes());
  pretend::set_virtual_clock(1e9);
  fixture.backend->keep_times(true);
  gpu::delay(consumer.handle, std::chrono::hours(9));
  const EventPtr later = fixture.backend->record(consumer.stream());
  for (int i = 0; i < 8; ++i) {
    const EventPtr copied = fixture.backend->copy(whole(source, device.data(), {later}));
    fixture.backend->wait(consumer.stream(), copied);
    consumer.finish();
    const auto copy = copied->when();
    EXPECT(copy && copy->begin < copy->end);
  }
}

}  // namespace
