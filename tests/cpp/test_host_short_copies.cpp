// HostBackend: copies so short that the calling thread makes them (Note [A short copy is made at once]).
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "host/host_backend.h"
#include "io/file.h"
#include "random.h"
#include "stopped_host.h"
#include "system.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

/// Casts as Gate does, and notes by which thread.
std::thread::id caster;
void noting_cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count) {
  caster = std::this_thread::get_id();
  Gate::cast(dst, dst_type, src, src_type, count);
}

TEST(host_short_copy_is_made_by_the_calling_thread) {
  HostBackend backend(&noting_cast, 1, 4000);
  const auto ram = random_bytes(4004, 3);
  std::vector<std::byte> dst(8000), expected(2000);
  Gate::cast(expected.data(), Scalar::f16, ram.data(), Scalar::f32, 1000);
  const auto copy = [&](std::uint64_t count) {
    return backend.copy(request(ram_source(ram.data(), count, Scalar::f32, Scalar::f16), dst.data()));
  };
  const EventPtr made = copy(1000);
  EXPECT(made->done());
  EXPECT(made->when().has_value());
  EXPECT(caster == std::this_thread::get_id());
  EXPECT(std::memcmp(dst.data(), expected.data(), expected.size()) == 0);
  backend.wait(0, copy(1001));  // a byte too many
  EXPECT(caster != std::this_thread::get_id());
}

TEST(host_short_copy_counts_all_of_its_steps) {
  HostBackend backend(&noting_cast, 1, 4000);
  const auto ram = random_bytes(4004, 3);
  std::vector<std::byte> dst(8000);
  CopyRequest two = request(ram_source(ram.data(), 501, Scalar::f32, Scalar::f16), dst.data());
  two.steps.push_back(
      request(ram_source(ram.data(), 500, Scalar::f32, Scalar::f16), dst.data() + 2000).steps.front());
  backend.wait(0, backend.copy(std::move(two)));
  EXPECT(caster != std::this_thread::get_id());
}

TEST(host_short_copy_waits_for_its_events) {
  HostBackend backend(&Gate::cast, 1, 4000);
  Gate::reset();
  std::vector<std::byte> longer(5000), dst(5000), last(8);
  const EventPtr gate =
      backend.copy(request(ram_source(longer.data(), 5000, Scalar::f8_e5m2, Scalar::raw8), dst.data()));
  Gate::wait_until_reached();
  const EventPtr after =
      backend.copy(request(ram_source(longer.data(), 8, Scalar::raw8, Scalar::raw8), last.data(), {gate}));
  EXPECT(!after->done());
  Gate::open();
  backend.wait(0, after);
  EXPECT(gate->done());
}

TEST(host_short_copy_never_waits_for_a_disk) {
  HostBackend backend(&noting_cast, 1);
  const TempFile written(1u << 20);
  const auto file = File::open(written.path());
  std::vector<std::byte> dst(8000);
  const auto by_worker = [&](Keep keep) {
    Source source = *file_source(file, 4096, 1000, Scalar::f32, Scalar::f16);
    source.keep = keep;
    backend.wait(0, backend.copy(request(std::make_shared<const Source>(source), dst.data())));
    return caster != std::this_thread::get_id();
  };
  evict(written.path());
  if (cached_pages(written.path(), 4096, 4096) > 0) return;  // a file system that has its files in RAM
  EXPECT(by_worker(Keep::yes));                              // which reads it into the page cache
  EXPECT(!by_worker(Keep::yes));
  EXPECT(by_worker(Keep::no));
}

TEST(host_short_copy_that_fails_says_why_every_time) {
  HostBackend backend(&Gate::cast, 1);
  TempFile written(1u << 20);
  const auto file = File::open(written.path());
  std::vector<std::byte> dst(1000);
  backend.wait(0, backend.copy(request(file_source(file, 4096, 1000), dst.data())));
  written.truncate(100);
  const EventPtr failed = backend.copy(request(file_source(file, 4096, 1000), dst.data()));
  for (int i = 0; i < 2; ++i) EXPECT_THROWS(backend.wait(0, failed), SourceError);
  EXPECT(failed->done());
}

TEST(host_close_waits_for_short_copies) {
  HostBackend backend(&Gate::cast, 1);
  Gate::reset();
  std::byte byte{}, sink{};
  std::thread caller(
      [&] { backend.copy(request(ram_source(&byte, 1, Scalar::f8_e5m2, Scalar::raw8), &sink)); });
  Gate::wait_until_reached();
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    backend.close();
    closed = true;
  });
  // Nothing tells when it would have returned without waiting.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT(!closed);
  Gate::open();
  caller.join();
  closer.join();
  EXPECT_THROWS(backend.copy(request(ram_source(&byte, 1, Scalar::raw8, Scalar::raw8), &sink)), ClosedError);
}

}  // namespace
