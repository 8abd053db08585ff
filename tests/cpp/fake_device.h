// A device crueller than any GPU: deterministic, seeded, adversarial.
//
// Note [The fake device]: consumer streams and copies are queues of operations in one scheduler. Nothing
// runs when it is enqueued; after each call a seeded scheduler runs some of what the DECLARED order allows,
// in an order of its liking: copies at once while kernels wait, kernels at once while copies wait, or any
// mixture. So whatever the engine forgot to declare goes wrong under some seed, and the same seed shows it
// again. Rules of the device:
//   - a consumer stream is first-in first-out; a queued wait is for the event it was given;
//   - copies are ordered by Step::after and by nothing else, nor are the steps of one copy;
//   - a step first scribbles over its destination (a transfer under way), and some time later reads its
//     sources and writes the bytes;
//   - a kernel checks what it reads when it begins and, some time later, when it ends;
//   - device memory that is freed is poisoned; if an operation that is still queued uses it: a violation.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "random.h"

namespace dynswap::test {

/// The bytes that a kernel has to find. Shared, since many kernels read the same weight.
using Expected = std::shared_ptr<const std::vector<std::byte>>;

/// A call of the backend, at which another thread might run in between.
enum class Call { allocate, copy, wait, record };

/// Thread-safe.
class FakeDevice : public std::enable_shared_from_this<FakeDevice> {
 public:
  explicit FakeDevice(std::uint64_t seed, std::size_t alignment = 64);
  ~FakeDevice();

  /// An engine's way to the device, which lives on when the engine is gone.
  std::unique_ptr<Backend> backend();

  /// Enqueues a kernel that reads `expected->size()` bytes at `data`. `what` names it in violations.
  void kernel(Stream stream, const std::byte* data, Expected expected, const std::string& what);

  /// Enqueues a write of host memory, as a copy from the device to the host makes it.
  void host_write(Stream stream, std::byte* to, std::size_t bytes, std::byte value);

  /// Runs all that has been enqueued. What cannot run then (a deadlock) is a violation.
  void drain();

  /// An allocation that would take the device above `bytes` fails, and is a violation.
  void set_cap(std::size_t bytes);
  /// How many copies and allocations fail, of 1000.
  void set_failures(unsigned copies, unsigned allocations);

  /// Is run at the beginning of each call of the backend: what another thread might do just then, made
  /// reproducible. The engine holds no lock at such a call (core/backend.h). Set before the engine runs.
  void set_interloper(std::function<void(Call)> interloper) { interloper_ = std::move(interloper); }

  /// From now on, memory may be let go before it was read, as with a caching allocator: allocate() hands a
  /// block of the same size out again, with the bytes that it had. empty_cache() gives such blocks back.
  void set_caching();
  void empty_cache();
  std::size_t allocations() const;  ///< so far

  std::size_t live_bytes() const;
  std::size_t peak_bytes() const;
  std::vector<std::string> violations() const;
  /// Adds a violation that the test itself has found.
  void violation(const std::string& what);

 private:
  class Adapter;
  struct Client;  // who has a backend
  struct Mark;    // an event
  struct Block;   // an allocation
  struct Part;    // one step of a copy
  struct Copy;
  struct Op;  // one operation of a consumer stream

  // The calls of the backend.
  Memory allocate(std::size_t bytes);
  EventPtr copy(const std::shared_ptr<Client>& client, CopyRequest request);
  void wait(Stream consumer, const EventPtr& copied);
  EventPtr record(Stream consumer);
  void close(const std::shared_ptr<Client>& client);
  void synchronise(const EventPtr& event);
  bool release_after(const Memory& memory, const std::vector<EventPtr>& after);
  void free(const std::byte* base);

  // Under the lock.
  std::shared_ptr<Block> use(const std::byte* data, std::size_t bytes, const std::string& what);
  void note(const std::string& violation);
  void change_mood();
  void tick();           ///< lets the scheduler run some of what may run
  bool run_stream_op();  ///< one that may run; false: none may
  bool run_copy_part();  ///< the same
  bool run_one();        ///< either, as the mood prefers
  bool run_until(const EventPtr& event);
  bool run(Op& op);
  bool run(Part& part);

  void interlope(Call call) const {
    if (interloper_) interloper_(call);
  }

  std::function<void(Call)> interloper_;
  mutable std::mutex mutex_;
  const DeviceTraits traits_;
  Random random_;
  double copy_rate_ = 1;    ///< mood: how likely the next part of a copy runs now
  double stream_rate_ = 1;  ///< mood: how likely the next operation of a consumer stream runs now
  bool fickle_ = false;     ///< the mood changes now and then
  bool hurry_ = false;      ///< latencies do not count: somebody waits for the device
  std::uint64_t now_ = 0;   ///< ticks
  std::map<Stream, std::deque<Op>> streams_;
  std::vector<std::unique_ptr<Part>> parts_;  ///< of copies that are not over
  std::map<const std::byte*, std::shared_ptr<Block>> blocks_;
  std::vector<std::shared_ptr<Block>> quarantine_;  ///< freed: poisoned, and never handed out again
  bool caching_ = false;
  std::size_t allocations_ = 0;
  std::vector<std::shared_ptr<Block>> cache_;  ///< freed, and may be handed out again
  std::size_t cap_ = static_cast<std::size_t>(-1);
  std::size_t live_ = 0;
  std::size_t peak_ = 0;
  unsigned failing_copies_ = 0;
  unsigned failing_allocations_ = 0;
  std::atomic<std::uint64_t> host_synchronisations_{0};
  std::vector<std::string> violations_;
};

}  // namespace dynswap::test
