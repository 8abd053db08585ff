// Note [When torch's allocator asks]
// torch's CUDA allocator runs the callbacks of a registry when none of the blocks that it keeps fits: before
// it asks the driver for more, and long before it gives up. The callbacks are not told for how many bytes, so
// at that point nobody knows whether memory is short. Therefore residents are only lent: their blocks go back
// to the allocator, and the callback says that it freed nothing. The allocator then asks the driver first.
// Only if that has no memory does it give back to the driver what it keeps, lent blocks included, and asks
// again. At the end it reports the outcome to the profiler of the calling thread, still under its lock. We
// stand in for that profiler meanwhile, and take the blocks back. Their bytes are as they were if nothing was
// given back to the driver and nothing else was allocated, which the allocator's counters tell.
//
// So a resident's memory goes to others only if the allocation would have failed, and no allocation fails
// that residents could have made room for. It costs two calls of the allocator for each resident, whenever
// the allocator has no block of its own.
//
// With expandable segments the allocator asks the driver only for what is missing behind the last free block,
// and that would be a resident's: it would go although memory is not short. How many bytes are wanted is not
// told, so nobody can say when it is. Residents do not give way then.
//
// All of this runs under the allocator's (recursive) lock, on any thread that allocates: it must not wait for
// Python, nor for a lock under which another thread allocates. While torch records the history of its memory,
// torch takes Python's lock for a stack trace, and then the allocator's. We hold the allocator's already, and
// a thread that frees a tensor holds Python's and waits for the allocator's: the two would wait for each
// other. So residents do not give way then.
#include "accelerator/giving_way.h"

#include <c10/core/Allocator.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Registry.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerator/torch_device.h"
#include "platform/fork_safe.h"
#include "platform/process.h"

namespace c10 {

/// The class of c10/cuda/CUDACachingAllocator.h, declared here as that header needs the toolkit's.
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};

}  // namespace c10

namespace dynswap {
namespace {

using CallbackRegistry = c10::Registry<std::string, std::unique_ptr<c10::FreeMemoryCallback>>;

struct Giver {
  std::uint64_t id;
  c10::Device device;
  Engine* engine;  ///< its GivesWay keeps it alive
};

struct Givers {
  Mutex mutex;
  // LOCK: mutex, all below. It comes after the allocator's lock and before the engine's.
  std::vector<Giver> all;
  std::uint64_t latest = 0;
};

Givers& givers() {
  static auto* const one = new Givers;
  // A fork waits until no other thread lends or takes back, so that the child can take the mutex.
  static const bool follows_forks = [] {
    Engine::register_fork_handlers();  // first: see Note [A fork waits for engines]
    return at_fork([] { one->mutex.lock(); }, [] { one->mutex.unlock(); }, [] { one->mutex.unlock(); });
  }();
  static_cast<void>(follows_forks);
  return *one;
}

/// Whether torch records a history of its allocations: the argument of the latest
/// set_memory_history_recorded().
std::atomic<bool> records_history{false};

/// Set while the calling thread is in here, where it allocates itself.
thread_local bool busy = false;

struct Busy {
  Busy() noexcept { busy = true; }
  ~Busy() { busy = false; }
};

struct Loans {
  std::uint64_t giver;
  std::vector<Engine::Loan> loans;
};

std::vector<Loans> lend(const c10::Device& device) {
  std::vector<Loans> lent;
  const std::lock_guard lock(givers().mutex);
  for (const Giver& giver : givers().all) {
    if (giver.device != device) continue;
    std::vector<Engine::Loan> loans = giver.engine->lend_residents();
    if (!loans.empty()) lent.push_back({giver.id, std::move(loans)});
  }
  return lent;
}

/// What the allocator has done so far.
struct Done {
  std::int64_t given_back = 0;  ///< segments, to the driver
  std::int64_t allocated = 0;   ///< blocks

  static Done on(const c10::Device& device) {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return {stats.num_device_free, stats.allocation[kAll].allocated};
  }
};

void settle(const c10::Device& device, std::vector<Loans> lent, bool intact) {
  const std::lock_guard lock(givers().mutex);
  for (Loans& each : lent) {
    for (const Giver& giver : givers().all) {
      if (giver.id != each.giver) continue;
      if (!intact) {
        giver.engine->give_up(each.loans);
        continue;
      }
      // Blocks go back to the stream for which they were allocated.
      std::map<Stream, std::vector<Engine::Loan>> by_order;
      for (Engine::Loan& loan : each.loans) by_order[loan.order].push_back(std::move(loan));
      const c10::impl::VirtualGuardImpl guard(device.type());
      const auto intact = [&, before = Done::on(device)] {
        return Done::on(device).given_back == before.given_back;
      };
      for (auto& [order, loans] : by_order) {
        const c10::Stream stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(order));
        const c10::Stream before = guard.exchangeStream(stream);
        giver.engine->take_back(std::move(loans), intact);
        guard.exchangeStream(before);
      }
    }
  }
}

/// Stands in for the calling thread's profiler until the allocation that asked is over.
class Outcome final : public c10::MemoryReportingInfoBase {
 public:
  Outcome(const c10::Device& device, std::vector<Loans> lent)
      : device_(device), lent_(std::move(lent)), before_(Done::on(device)) {}

  bool memoryProfilingEnabled() const override { return true; }

  void reportMemoryUsage(void* address, std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                         c10::Device device) override {
    const bool over = bytes > 0 && device == device_;
    const auto self = over ? c10::ThreadLocalDebugInfo::_pop(kind()) : nullptr;
    if (over) {
      const Busy guard;
      const Done now = Done::on(device_);
      settle(device_, std::move(lent_),
             now.given_back == before_.given_back && now.allocated == before_.allocated + 1);
      c10::reportMemoryUsageToProfiler(address, bytes, allocated, reserved, device);
    }
  }

  void reportOutOfMemory(std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                         c10::Device device) override {
    const auto self = c10::ThreadLocalDebugInfo::_pop(kind());
    const Busy guard;
    settle(device_, std::move(lent_), /*intact=*/false);
    c10::reportOutOfMemoryToProfiler(bytes, allocated, reserved, device);
  }

  static c10::DebugInfoKind kind() { return c10::DebugInfoKind::PROFILER_STATE; }

 private:
  const c10::Device device_;
  std::vector<Loans> lent_;
  const Done before_;
};

/// Whether the allocator grows its segments. A program may change that at any time.
bool segments_expand() noexcept {
  try {
    return c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments();
  } catch (const std::exception&) {
    return false;  // settings that torch cannot read: no allocator works with them
  }
}

struct LendResidents final : c10::FreeMemoryCallback {
  bool Execute() override {
    if (busy || records_history || segments_expand()) return false;
    try {
      const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
      const c10::Device device = guard.getDevice();
      if (is_captured(guard.getStream(device))) return false;  // it is a graph's own memory that is asked for
      const Busy working;
      std::vector<Loans> lent = lend(device);
      if (!lent.empty()) {
        c10::ThreadLocalDebugInfo::_push(Outcome::kind(), std::make_shared<Outcome>(device, std::move(lent)));
      }
    } catch (const std::exception&) {
      // the device is lost: so is the allocation
    }
    return false;
  }
};

/// Null if torch has none: a build without CUDA, or one whose symbols have other names.
CallbackRegistry* find_registry() noexcept {
  // c10::FreeCudaMemoryCallbacksRegistry(), of which std::string is a part.
  constexpr const char* kName = "_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev";
  void* found = loaded_function(kName);
  for (const char* library : {"libc10_cuda.so", "libc10_hip.so"}) {
    if (found == nullptr) found = loaded_function(kName, library);
  }
  return found == nullptr ? nullptr : reinterpret_cast<CallbackRegistry* (*)()>(found)();
}

bool registered() noexcept {
  static const bool done = [] {
    CallbackRegistry* const registry = find_registry();
    if (registry == nullptr) return false;
    constexpr const char* kOurs = "dynswap_ext";
    if (!registry->Has(kOurs)) registry->Register(kOurs, [] { return std::make_unique<LendResidents>(); });
    return true;
  }();
  return done;
}

/// Whether the device's allocator is torch's native one: of those for CUDA only that runs callbacks.
bool allocator_is_native(const c10::Device& device) noexcept {
  try {
    const auto& allocator = *c10::getDeviceAllocator(device.type());
    const std::string name = typeid(allocator).name();
    return name.find("CudaMallocAsync") == std::string::npos && name.find("Pluggable") == std::string::npos;
  } catch (const std::exception&) {
    return true;  // none has been set yet
  }
}

}  // namespace

GivesWay::GivesWay(const c10::Device& device, const std::shared_ptr<Engine>& engine) : engine_(engine) {
  static_cast<void>(runs_free_memory_callbacks(device));
  const std::lock_guard lock(givers().mutex);
  givers().all.push_back({++givers().latest, device, engine.get()});
}

GivesWay::~GivesWay() {
  const std::lock_guard lock(givers().mutex);
  std::erase_if(givers().all, [this](const Giver& giver) { return giver.engine == engine_.get(); });
}

bool runs_free_memory_callbacks(const c10::Device& device) noexcept {
  return *obstacle_to_free_memory_callbacks(device) == '\0';
}

const char* obstacle_to_free_memory_callbacks(const c10::Device& device) noexcept {
  if (!device.is_cuda()) return "torch's allocator for this type of device does not ask for memory";
  if (!registered()) return "this build of torch has no allocator callbacks";
  if (!allocator_is_native(device))
    return "the allocator that was chosen runs no callbacks; set backend:native in PYTORCH_ALLOC_CONF";
  if (segments_expand())
    return "with expandable segments the allocator would take them while the device has free memory; "
           "set expandable_segments:False in PYTORCH_ALLOC_CONF";
  return "";
}

void release_kept_memory(const c10::Device& device) noexcept {
  const TorchDevice torch(device);
  const OnDevice scope(torch);
  try {
    c10::getDeviceAllocator(device.type())->emptyCache();
  } catch (const std::exception&) {
    // it has been given nothing yet, or the device is lost: the next allocation tells
  }
}

void set_memory_history_recorded(bool recorded) noexcept { records_history = recorded; }

bool give_way(const c10::Device& device) {
  if (busy || records_history || runs_free_memory_callbacks(device)) return false;
  const Busy guard;
  std::vector<Loans> lent = lend(device);
  const bool any = !lent.empty();
  settle(device, std::move(lent), /*intact=*/false);
  return any;
}

}  // namespace dynswap
