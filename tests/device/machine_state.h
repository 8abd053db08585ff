// What the machine's parts share: order (machine.cpp), streams.cpp and memory.cpp.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "machine.h"

namespace pretend {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kSpan = std::size_t{64} << 30;  ///< addresses of a device

// The answers of the runtime that the machine itself gives (driver_types.h; torch's face needs no CUDA
// header).
constexpr int kInvalidValue = 1, kMemoryAllocation = 2, kNotPermitted = 800;
constexpr int kAlreadyRegistered = 712, kNotRegistered = 713;
constexpr int kCaptureUnsupported = 900, kCaptureIsolation = 905, kCapturedEvent = 907, kAssert = 710;

struct Capture {
  Graph graph;
  bool global = false;
  bool broken = false;
};

struct Point {
  Stream* stream = nullptr;
  std::shared_ptr<Capture> capture;  ///< recorded inside one: nobody but its streams may wait
  bool reached = false;
  Clock::time_point at;
};

struct Stream {
  struct Entry {
    Work work{};
    const char* what = "";
    PointPtr record{}, wait{};
    Clock::time_point not_before{};
    std::chrono::nanoseconds takes{};  ///< by the virtual clock
    Clock::time_point asked{};         ///< by the virtual clock
  };
  int device = 0;
  int priority = 0;
  std::deque<Entry> queue;
  bool running = false;    ///< the device's thread is at its first entry
  bool destroyed = false;  ///< goes with its last entry
  bool eager = false;      ///< as drawn last, in mixed order
  Clock::time_point now;   ///< by the virtual clock
  std::shared_ptr<Capture> capture;
};

/// Device addresses: free ranges by their first byte.
struct Memory {
  std::byte* visible = nullptr;
  std::byte* hidden = nullptr;
  std::map<std::size_t, std::size_t> free;  ///< offset, bytes
};

struct Machine {
  std::mutex mutex;
  std::condition_variable work, done;
  // LOCK: mutex, all below.
  std::vector<std::unique_ptr<Stream>> streams;
  Stream* defaults[kDevices]{};
  Memory memory[kDevices];
  std::vector<PointPtr> wanted;
  std::mt19937_64 random{1};
  Order order = Order::late;
  std::map<std::uintptr_t, std::pair<std::uintptr_t, bool>> pinned;  ///< begin: end, allocated by us
  std::multimap<std::uintptr_t, std::uintptr_t> pending_reads;  ///< pinned memory that queued copies read
  std::vector<std::pair<std::vector<PointPtr>, std::pair<void*, std::size_t>>> limbo;
  std::vector<std::weak_ptr<Capture>> captures;
  Counts counts;
  Faults faults;
  bool forbidden = false;
  bool watching_pages = false;
  std::vector<std::string> violations;
  std::string sticky;
  bool draining = false;
  bool stopping = false;
  double copy_speed = 0;       ///< bytes a second, by the virtual clock; 0: time is the machine's
  Clock::time_point host_now;  ///< the host's time, by the virtual clock
  bool drops_work = false;     ///< Note [A machine that does nothing]
  std::size_t under_way = 0;
  std::deque<PointPtr> recorded;  ///< while it drops work: the points that count as not reached
  Work setup;
  std::thread thread;
  std::atomic<Clock::rep> last_call{0};

  Machine() {
    for (int device = 0; device < kDevices; ++device) {
      auto map = [](int access) {
        void* at = mmap(nullptr, kSpan, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) std::abort();
        return static_cast<std::byte*>(at);
      };
      memory[device].visible = map(PROT_NONE);
      memory[device].hidden = map(PROT_READ | PROT_WRITE);
      memory[device].free[0] = kSpan;
      streams.push_back(std::make_unique<Stream>());
      defaults[device] = streams.back().get();
      defaults[device]->device = device;
    }
  }
};

Machine& machine();
/// Whether this process is a child that was forked when the device was in use.
bool forked_child() noexcept;

/// LOCK: mutex is held. Throws in a forked child.
void push(Machine& m, Stream& stream, Stream::Entry entry);
/// LOCK: mutex is held. Throws if queued work has failed.
void refuse_after_error(Machine& m);

}  // namespace pretend
