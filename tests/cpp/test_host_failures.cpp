// HostBackend: failing copies, and tear-down.
#include "host/host_backend.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "stopped_host.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

TEST(host_a_failed_copy_says_why_every_time) {
  HostBackend backend(&Gate::cast, 2);
  TempFile written(1u << 20);
  const auto file = File::open(written.path());
  std::vector<std::byte> dst(1u << 20);
  written.truncate(100);
  const EventPtr failed = backend.copy(request(file_source(file, 0, 1u << 20), dst.data()));
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROWS(backend.wait(0, failed), SourceError);
    const std::string message = message_of([&] { backend.wait(0, failed); });
    EXPECT(contains(message, "'file.weight'") && contains(message, written.path()));
  }
  EXPECT(failed->done());
  // What waits for it runs, and the backend goes on.
  const auto ram = random_bytes(1000, 5);
  backend.wait(0, backend.copy(request(ram_source(ram.data(), 1000, Scalar::raw8, Scalar::raw8), dst.data(),
                                       {failed})));
  EXPECT(std::memcmp(dst.data(), ram.data(), 1000) == 0);
}

TEST(host_a_failed_copy_is_not_over_before_its_events) {
  // Who writes there next waits for the failed copy alone, and so through it for what it waited for.
  Stopped host(2);
  TempFile written(1000);
  const auto file = File::open(written.path());
  std::vector<std::byte> dst(3000);
  CopyRequest broken = request(file_source(file, 0, 2000), dst.data());
  broken.steps.push_back(request(file_source(file, 0, 1000), dst.data() + 2000, {host.gate}).steps.front());
  const EventPtr failed = host.backend.copy(std::move(broken));
  host.backend.synchronise(host.noted(1));  // the other worker is past the step that fails
  EXPECT(!failed->done());
  Gate::open();
  EXPECT_THROWS(host.backend.wait(0, failed), SourceError);
  EXPECT(host.gate->done());
  // Its second step was not brought any more.
  EXPECT(std::all_of(dst.begin() + 2000, dst.end(), [](std::byte b) { return b == std::byte{}; }));
}

TEST(host_sources_live_until_the_copy_is_over) {
  Stopped host;
  std::vector<std::byte> dst(8);
  auto bytes = std::make_shared<std::vector<std::byte>>(8, std::byte{7});
  const std::weak_ptr<void> alive = bytes;
  const std::byte* const data = bytes->data();
  const EventPtr copied = host.backend.copy(
      request(ram_source(data, 8, Scalar::raw8, Scalar::raw8, std::move(bytes)), dst.data()));
  EXPECT(!alive.expired());
  Gate::open();
  host.backend.wait(0, copied);
  EXPECT_EQ(static_cast<int>(dst[7]), 7);
  host.backend.close();  // joins the worker, which lets go just after the event
  EXPECT(alive.expired());
}

TEST(host_close_fails_what_has_not_begun) {
  Stopped host;
  const EventPtr queued = host.noted(1);
  const EventPtr dependant = host.noted(2, {queued});
  const EventPtr after_running = host.noted(3, {host.gate});
  std::thread closer([&] { host.backend.close(); });
  while (!queued->done() || !dependant->done()) std::this_thread::yield();
  EXPECT(!host.gate->done());  // what runs is finished
  EXPECT(!after_running->done());
  Gate::open();
  closer.join();
  EXPECT(host.gate->done() && after_running->done());
  host.backend.wait(0, host.gate);
  for (const EventPtr& event : {queued, dependant, after_running})
    EXPECT_THROWS(host.backend.wait(0, event), Error);
  EXPECT(Gate::order().empty());
  EXPECT_THROWS(host.noted(4), Error);
  host.backend.close();
}

TEST(host_destroyed_with_copies_queued) {
  TempFile written(32u << 20);
  const auto file = File::open(written.path());
  std::vector<std::byte> dst(32u << 20);
  EventPtr last;
  {
    HostBackend backend(&Gate::cast, 2);
    for (int i = 0; i < 5; ++i) {
      last = backend.copy(request(file_source(file, 0, 32u << 20), dst.data(), {last}));
    }
  }
  EXPECT(last->done());
}

}  // namespace
