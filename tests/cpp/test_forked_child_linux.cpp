// What waits for threads, dropped and used in a forked child that does not have them: Note [A forked child
// has one thread]. Each test stops threads of the parent for certain where the child would have waited.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "forked_child.h"
#include "io/memory_watch.h"
#include "io/worker_pool.h"
#include "platform/memory.h"
#include "stopped_host.h"
#include "transfer/staging.h"
#include "versioned_masters.h"
#include "watched_memory.h"

namespace dynswap::test {

namespace {

template <class Error, class Call>
bool throws(const Call& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

/// Its copies stop at the barrier.
class StoppingBackend final : public ImmediateBackend {
 public:
  explicit StoppingBackend(Barrier& barrier) : barrier_(barrier) {}
  EventPtr copy(CopyRequest request) override {
    barrier_.stop_here();
    return ImmediateBackend::copy(std::move(request));
  }

 private:
  Barrier& barrier_;
};

}  // namespace

TEST(forked_child_drops_an_engine_in_which_a_thread_waits) {
  // One thread issues copies to all of the cache, and another one needs room there. Neither has a lease, so
  // the engine is the child's to destroy.
  constexpr std::uint32_t kExperts = 4;
  Barrier barrier;
  EngineOptions options;
  options.budget = 3 * kWeightBytes;
  auto engine = std::make_shared<Engine>(std::make_unique<StoppingBackend>(barrier), options);
  std::vector<WeightId> experts;
  for (std::uint32_t i = 0; i < kExperts; ++i)
    experts.push_back(engine->add_weight(versioned_source(i, 0), i, {.by_use = true}));
  engine->plan();
  const std::weak_ptr<Engine> known = engine;
  std::thread issuing([&, &engine = *engine] { engine.expect({experts[0], experts[1], experts[2]}); });
  barrier.wait_until_reached();
  std::thread waiting([&, &engine = *engine] { engine.acquire(experts[3], 0); });
  wait_until_others_sleep();
  EXPECT_EQ(engine->stats().live_leases, 0u);
  EXPECT(in_a_forked_child([&] {
    const bool refused = throws<Error>([&] { engine->acquire(experts[3], 0); });
    engine->close();
    engine.reset();
    return refused && known.expired();
  }));
  barrier.open();
  issuing.join();
  waiting.join();
}

TEST(forked_child_drops_a_lease_on_a_copy_that_is_not_issued) {
  Barrier barrier;
  EngineOptions options;
  options.budget = 3 * kWeightBytes;
  auto engine = std::make_shared<Engine>(std::make_unique<StoppingBackend>(barrier), options);
  const WeightId id = engine->add_weight(versioned_source(0, 0), 0);
  engine->plan();
  std::thread issuing([&] { engine->acquire(id, 0); });
  barrier.wait_until_reached();
  std::thread waiting([&] { engine->acquire(id, 1); });
  wait_until_others_sleep();
  EXPECT_EQ(engine->stats().live_leases, 2u);
  EXPECT(in_a_forked_child([&] {
    engine->update_source(id, versioned_source(0, 1));
    return throws<Error>([&] { engine->acquire(id, 2); });
  }));
  barrier.open();
  issuing.join();
  waiting.join();
}

TEST(forked_child_has_no_recording) {
  struct Done final : Event {
    bool done() const noexcept override { return true; }
    std::optional<Interval> when() const noexcept override { return Interval{1, 2}; }
  };
  struct Timed final : ImmediateBackend {
    EventPtr copy(CopyRequest request) override {
      ImmediateBackend::copy(std::move(request));
      return std::make_shared<Done>();
    }
  };
  EngineOptions options;
  options.budget = 3 * kWeightBytes;
  const auto engine = std::make_shared<Engine>(std::make_unique<Timed>(), options);
  const WeightId id = engine->add_weight(versioned_source(0, 0), 0);
  engine->plan();
  engine->record(true);
  engine->acquire(id, 0);
  EXPECT(!engine->timeline().spans.empty());
  EXPECT(in_a_forked_child([&] { return engine->timeline().spans.empty() && engine->groups().size() == 1; }));
}

TEST(forked_child_drops_a_pool_of_idle_threads) {
  auto pool = std::make_unique<WorkerPool>(2);
  wait_until_others_sleep();
  EXPECT(in_a_forked_child([&] {
    pool.reset();
    return true;
  }));
}

TEST(forked_child_has_a_closed_pool) {
  auto pool = std::make_unique<WorkerPool>(1);
  Barrier barrier;
  bool cancelled = false;
  EXPECT(pool->submit({[&] { barrier.stop_here(); }, {}}));
  barrier.wait_until_reached();
  EXPECT(pool->submit({[] {}, [&] { cancelled = true; }}));  // stays in the queue
  EXPECT(in_a_forked_child([&] {
    const bool taken = pool->submit({[] {}, {}});
    pool->promote(nullptr);
    pool->close();
    pool.reset();
    return !taken && !cancelled;
  }));
  barrier.open();
}

TEST(forked_child_drops_copies_that_a_thread_waits_for) {
  auto host = std::make_unique<Stopped>();
  std::thread waiting([&] { host->backend.wait(0, host->gate); });
  wait_until_others_sleep();
  EXPECT(in_a_forked_child([&] {
    host->backend.synchronise(host->gate);
    if (!throws<ClosedError>([&] { host->backend.wait(0, host->gate); })) return false;
    const EventPtr further = host->noted(1);  // no thread is there to copy it
    if (!throws<ClosedError>([&] { host->backend.wait(0, further); })) return false;
    host->backend.close();
    host->backend.~HostBackend();
    return true;
  }));
  Gate::open();
  waiting.join();
}

TEST(forked_child_drops_a_staging_ring_that_a_thread_waits_for) {
  constexpr std::size_t kBytes = 4096;
  const auto buffer = std::make_shared<std::vector<std::byte>>(kBytes);
  auto ring = std::make_unique<StagingRing>(std::vector<StagingRing::Buffer>(2, {buffer, buffer->data()}),
                                            kBytes, 1, &Gate::cast);
  Gate::reset();
  const std::byte byte{};
  const SourcePtr gate = ram_source(&byte, 1, Scalar::f8_e5m2, Scalar::raw8);
  const auto reads = std::make_shared<Reads>();
  const StagingRing::Ticket ticket = ring->add({{{gate, 0, 1, nullptr}, 0}}, reads);
  Gate::wait_until_reached();
  std::thread awaiting([&] { ring->await(ticket.chunk); });
  std::thread waiting([&] { EXPECT(ring->wait(*reads, std::chrono::seconds(60))); });
  wait_until_others_sleep();
  EXPECT(in_a_forked_child([&] {
    ring->await(ticket.chunk);
    ring->give_up(*reads);
    if (!throws<ClosedError>([&] { ring->wait(*reads, std::chrono::milliseconds(1)); })) return false;
    const auto others = std::make_shared<Reads>();
    ring->add({{{gate, 0, 1, nullptr}, 0}}, others);  // fails, and notifies
    if (!throws<ClosedError>([&] { ring->wait(*others, std::chrono::milliseconds(1)); })) return false;
    ring->close();
    ring.reset();
    return true;
  }));
  Gate::open();
  awaiting.join();
  waiting.join();
}

namespace {

// A thread that looks at a page that cannot be read stops there until it can.
std::atomic<bool> looking{false};
std::byte* looked_at = nullptr;

void stop_at_page(int) {
  looking = true;
  while (looking) ::usleep(1000);
  ::mprotect(looked_at, kPage, PROT_READ | PROT_WRITE);
}

}  // namespace

TEST(forked_child_looks_through_a_watch_that_a_thread_looks_through) {
  const auto memory = pages(1);
  auto watch = std::make_unique<MemoryWatch>(memory.get(), kPage);
  const std::uint64_t before = watch->writes();
  memory.get()[5] = std::byte{8};
  looked_at = memory.get();
  struct sigaction stop{};
  stop.sa_handler = &stop_at_page;
  struct sigaction as_before{};
  ::sigaction(SIGSEGV, &stop, &as_before);
  ::mprotect(memory.get(), kPage, PROT_NONE);
  std::thread looking_at([&] { watch->writes(); });
  while (!looking) std::this_thread::yield();
  EXPECT(in_a_forked_child([&] {
    ::mprotect(looked_at, kPage, PROT_READ | PROT_WRITE);
    if (watch->writes() != before) return false;  // it starts again: nothing half changed is looked at
    memory.get()[7] = std::byte{9};
    std::uint64_t count = before;
    if (!seen_once(*watch, count)) return false;
    watch.reset();
    return true;
  }));
  EXPECT(in_a_forked_child([&] {
    watch.reset();  // without a look
    return true;
  }));
  looking = false;
  looking_at.join();
  ::sigaction(SIGSEGV, &as_before, nullptr);
}

}  // namespace dynswap::test
