#include "machine.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include "pages.h"

namespace pretend {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kSpan = std::size_t{64} << 30;  ///< addresses of a device
constexpr std::size_t kAlignment = 512;
constexpr std::size_t kPage = 4096;
constexpr auto kIdle = std::chrono::milliseconds(3);

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

}  // namespace

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
    std::chrono::nanoseconds takes{};  ///< of the virtual clock
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

namespace {

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
  double copy_speed = 0;  ///< bytes a second, by the virtual clock; 0: time is the machine's
  Clock::time_point host_now;
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

std::atomic<bool> forked{false};
thread_local bool device_thread = false;

Machine& machine() {
  static Machine* const one = [] {
    // A process that has not begun to use the device may fork.
    // No thread but the forking one is in the child: a lock that another held would be held for ever.
    pthread_atfork([] { machine().mutex.lock(); }, [] { machine().mutex.unlock(); },
                   [] {
                     machine().mutex.unlock();
                     forked = machine().thread.joinable();
                   });
    return new Machine;
  }();
  return *one;
}

bool head_ready(const Stream& stream, Clock::time_point now) {
  if (stream.queue.empty() || stream.running) return false;
  const Stream::Entry& head = stream.queue.front();
  return (!head.wait || head.wait->reached) && head.not_before <= now;
}

/// The stream whose first entry has to run before `point` can be reached, if it may run now.
Stream* leading_to(const Point* point, Clock::time_point now) {
  for (int hops = 0; hops < 10000; ++hops) {
    Stream* const stream = point->stream;
    if (stream->queue.empty()) return nullptr;
    const Stream::Entry& head = stream->queue.front();
    if (!head.wait || head.wait->reached) return head_ready(*stream, now) ? stream : nullptr;
    point = head.wait.get();
  }
  return nullptr;
}

Stream* choose(Machine& m) {
  const auto now = Clock::now();
  std::vector<Stream*> ready;
  for (const PointPtr& point : m.wanted) {
    if (point->reached) continue;
    if (Stream* const stream = leading_to(point.get(), now)) ready.push_back(stream);
  }
  const bool idle = now.time_since_epoch().count() - m.last_call > Clock::duration(kIdle).count();
  if (ready.empty() || (m.order != Order::late && m.copy_speed == 0)) {
    for (const auto& stream : m.streams) {
      if (!head_ready(*stream, now)) continue;
      if (m.order == Order::mixed && m.random() % 16 == 0) stream->eager = m.random() % 2 == 0;
      const bool eager = m.order == Order::early || (m.order == Order::mixed && stream->eager);
      if (eager || idle || m.draining) ready.push_back(stream.get());
    }
  }
  return ready.empty() ? nullptr : ready[m.random() % ready.size()];
}

void run_device() {
  device_thread = true;
  Machine& m = machine();
  std::unique_lock lock(m.mutex);
  if (m.setup) m.setup();
  while (!m.stopping) {
    Stream* const stream = choose(m);
    if (stream == nullptr) {
      m.work.wait_for(lock, std::chrono::milliseconds(1));
      continue;
    }
    Stream::Entry entry = std::move(stream->queue.front());
    stream->running = true;
    stream->queue.front() = {};
    std::string error;
    lock.unlock();
    try {
      if (entry.work) entry.work();
    } catch (const std::exception& caught) {
      error = std::string(entry.what) + ": " + caught.what();
    }
    entry.work = nullptr;  // what it holds goes without the lock
    lock.lock();
    if (!error.empty() && m.sticky.empty()) m.sticky = error;
    stream->queue.pop_front();
    stream->running = false;
    if (entry.wait) stream->now = std::max(stream->now, entry.wait->at);
    stream->now = std::max(stream->now, entry.asked) + entry.takes;
    if (entry.record) {
      entry.record->reached = true;
      entry.record->at = m.copy_speed > 0 ? stream->now : Clock::now();
    }
    if (stream->destroyed && stream->queue.empty()) {
      std::erase_if(m.streams, [&](const auto& each) { return each.get() == stream; });
    }
    m.done.notify_all();
  }
}

void begin_thread(Machine& m) {
  if (m.thread.joinable() || m.stopping) return;
  m.thread = std::thread(run_device);
  std::atexit([] {
    Machine& all = machine();
    if (forked) return all.thread.detach();
    {
      const std::lock_guard lock(all.mutex);
      all.stopping = true;
    }
    all.work.notify_all();
    all.done.notify_all();
    if (all.thread.joinable()) all.thread.join();
  });
}

void push(Machine& m, Stream& stream, Stream::Entry entry) {
  if (forked) throw DeviceFault(3, "CUDA cannot be used in a forked child");
  begin_thread(m);
  if (stream.capture) {
    if (entry.wait) return;  // the capture's order is that of the calls
    if (entry.record) entry.record->capture = stream.capture;
    if (entry.work) stream.capture->graph.emplace_back(std::move(entry.work), entry.what);
    return;
  }
  entry.asked = m.host_now;
  stream.queue.push_back(std::move(entry));
  m.counts.longest_queue = std::max<std::uint64_t>(m.counts.longest_queue, stream.queue.size());
  m.work.notify_one();
}

void refuse_after_error(Machine& m) {
  if (!m.sticky.empty()) throw DeviceFault(kAssert, "an earlier kernel failed: " + m.sticky);
}

Pinned pinned_locked(const Machine& m, std::uintptr_t begin, std::size_t bytes) {
  auto found = m.pinned.upper_bound(begin);
  if (found != m.pinned.begin() && std::prev(found)->second.first > begin) {
    return std::prev(found)->second.first >= begin + bytes ? Pinned::whole : Pinned::torn;
  }
  return found != m.pinned.end() && found->first < begin + bytes ? Pinned::torn : Pinned::no;
}

/// The bytes themselves. Memory that was pinned when the copy was asked for has to be so still.
void move_bytes(void* to, const void* from, std::size_t bytes, bool pinned_source, bool pinned_target) {
  const auto still = [bytes](const void* address, const char* what) {
    if (pinned(address, bytes) == Pinned::whole) return true;
    violate(std::string("a queued copy ") + what + " memory that is not pinned any more");
    return false;
  };
  if (pinned_source && !still(from, "reads")) return;
  if (pinned_target && !still(to, "writes")) return;
  const void* const source = hidden(from) != nullptr ? hidden(from) : from;
  void* const target = hidden(to) != nullptr ? hidden(to) : to;
  std::memcpy(target, source, bytes);
}

}  // namespace

std::vector<int>& contexts() noexcept {
  thread_local std::vector<int> stack;
  return stack;
}

int current_device() noexcept { return contexts().empty() ? 0 : contexts().back(); }

void set_device(int device) noexcept {
  if (contexts().empty()) contexts().push_back(device);
  contexts().back() = device;
}

void set_thread_setup(Work setup) {
  const std::lock_guard lock(machine().mutex);
  machine().setup = std::move(setup);
}

void reset(std::uint64_t seed, Order order) {
  Machine& m = machine();
  std::unique_lock lock(m.mutex);
  m.draining = true;
  m.work.notify_all();
  m.done.wait(lock, [&] {
    return m.stopping || std::all_of(m.streams.begin(), m.streams.end(),
                                     [](const auto& stream) { return stream->queue.empty(); });
  });
  m.draining = false;
  m.random.seed(seed);
  m.order = order;
  for (const auto& stream : m.streams) {
    stream->eager = m.random() % 2 == 0;
    stream->capture.reset();
  }
  m.faults = {};
  m.forbidden = m.watching_pages = false;
  m.copy_speed = 0;
  m.violations.clear();
  m.sticky.clear();
  const Counts old = m.counts;
  m.counts = {};
  m.counts.registered_bytes = old.registered_bytes;
  m.counts.streams = old.streams;
  m.counts.events = old.events;
  m.counts.contexts = old.contexts;
}

void note_call() noexcept { machine().last_call = Clock::now().time_since_epoch().count(); }

// --------------------------------------------------------------------------------------------- memory

int device_of(const void* address) noexcept {
  const auto* at = static_cast<const std::byte*>(address);
  for (int device = 0; device < kDevices; ++device) {
    const std::byte* const begin = machine().memory[device].visible;
    if (at >= begin && at < begin + kSpan) return device;
  }
  return -1;
}

std::byte* hidden(const void* address) noexcept {
  const int device = device_of(address);
  if (device < 0) return nullptr;
  const Memory& memory = machine().memory[device];
  return memory.hidden + (static_cast<const std::byte*>(address) - memory.visible);
}

void* reserve(int device, std::size_t bytes) {
  Machine& m = machine();
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard lock(m.mutex);
  auto& free = m.memory[device].free;
  for (auto it = free.begin(); it != free.end(); ++it) {
    if (it->second < size) continue;
    const auto [offset, room] = *it;
    free.erase(it);
    if (room > size) free[offset + size] = room - size;
    return m.memory[device].visible + offset;
  }
  return nullptr;
}

void release(int device, void* address, std::size_t bytes) {
  Machine& m = machine();
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard lock(m.mutex);
  Memory& memory = m.memory[device];
  const std::size_t offset = static_cast<std::byte*>(address) - memory.visible;
  const std::size_t first = (offset + kPage - 1) / kPage * kPage, last = (offset + size) / kPage * kPage;
  if (last > first) madvise(memory.hidden + first, last - first, MADV_DONTNEED);
  auto [it, fresh] = memory.free.emplace(offset, size);
  if (const auto next = std::next(it); next != memory.free.end() && next->first == it->first + it->second) {
    it->second += next->second;
    memory.free.erase(next);
  }
  if (it != memory.free.begin()) {
    const auto before = std::prev(it);
    if (before->first + before->second == it->first) {
      before->second += it->second;
      memory.free.erase(it);
    }
  }
}

void poison(Stream& stream, void* address, std::size_t bytes) {
  std::byte* const at = hidden(address);
  enqueue(stream, [at, bytes] { std::memset(at, kPoison, bytes); }, "poison");
}

// -------------------------------------------------------------------------------------------- streams

Stream& default_stream(int device) { return *machine().defaults[device]; }

Stream& make_stream(int device, int priority) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  m.streams.push_back(std::make_unique<Stream>());
  Stream& stream = *m.streams.back();
  stream.device = device;
  stream.priority = priority;
  stream.eager = m.random() % 2 == 0;
  ++m.counts.streams;
  return stream;
}

void destroy(Stream& stream) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  --m.counts.streams;
  stream.destroyed = true;
  if (stream.queue.empty()) {
    std::erase_if(m.streams, [&](const auto& each) { return each.get() == &stream; });
  }
}

int device_of(const Stream& stream) noexcept { return stream.device; }
int priority_of(const Stream& stream) noexcept { return stream.priority; }

void enqueue(Stream& stream, Work work, const char* what, std::size_t copied_bytes) {
  Machine& m = machine();
  note_call();
  const std::lock_guard lock(m.mutex);
  refuse_after_error(m);
  const double seconds = m.copy_speed > 0 ? static_cast<double>(copied_bytes) / m.copy_speed : 0;
  push(m, stream,
       {.work = std::move(work),
        .what = what,
        .takes = std::chrono::nanoseconds(static_cast<std::int64_t>(1e9 * seconds))});
}

void enqueue_host_function(Stream& stream, Work work) {
  Machine& m = machine();
  note_call();
  const std::lock_guard lock(m.mutex);
  refuse_after_error(m);
  ++m.counts.host_functions;
  push(m, stream, {.work = std::move(work), .what = "a host function"});
}

void enqueue_delay(Stream& stream, std::chrono::nanoseconds delay) {
  Machine& m = machine();
  note_call();
  const std::lock_guard lock(m.mutex);
  if (m.copy_speed > 0) return push(m, stream, {.what = "a delay", .takes = delay});
  push(m, stream, {.what = "a delay", .not_before = Clock::now() + delay});
}

bool idle(Stream& stream) {
  Machine& m = machine();
  note_call();
  const std::lock_guard lock(m.mutex);
  return stream.queue.empty();
}

void copy(Stream& stream, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  Machine& m = machine();
  const bool from_host = device_of(from) < 0, to_host = device_of(to) < 0;
  const Pinned source = from_host ? pinned(from, bytes) : Pinned::no;
  const Pinned target = to_host ? pinned(to, bytes) : Pinned::no;
  if (source == Pinned::torn || target == Pinned::torn) {
    throw DeviceFault(kInvalidValue, "a copy spans memory that is pinned and memory that is not");
  }
  const bool pinned_source = source == Pinned::whole, pinned_target = target == Pinned::whole;
  if (to_host && !pinned_target) refuse_if_forbidden("a copy to pageable memory");
  if (from_host && !to_host) {
    const std::lock_guard lock(m.mutex);
    ++m.counts.copies;
    m.counts.copied_bytes += bytes;
    if (!pinned_source) ++m.counts.pageable_copies;
  }
  if (from_host && !pinned_source) {  // read before the call returns
    auto staged = std::make_shared<std::vector<std::byte>>(bytes);
    std::memcpy(staged->data(), from, bytes);
    enqueue(stream, [=] { move_bytes(to, staged->data(), bytes, false, pinned_target); }, "a copy", bytes);
  } else if (pinned_source) {
    const auto begin = reinterpret_cast<std::uintptr_t>(from);
    {
      const std::lock_guard lock(m.mutex);
      m.pending_reads.emplace(begin, begin + bytes);
    }
    const auto work = [=, &m] {
      move_bytes(to, from, bytes, true, pinned_target);
      const std::lock_guard lock(m.mutex);
      if (const auto found = m.pending_reads.find(begin); found != m.pending_reads.end()) {
        m.pending_reads.erase(found);
      }
    };
    enqueue(stream, work, "a copy from pinned memory", bytes);
  } else {
    if (pinned_target) {
      const auto begin = reinterpret_cast<std::uintptr_t>(to);
      const std::lock_guard lock(m.mutex);
      const bool read = std::any_of(m.pending_reads.begin(), m.pending_reads.end(), [&](const auto& range) {
        return range.first < begin + bytes && range.second > begin;
      });
      if (!read) std::memset(to, kPoison, bytes);
    }
    enqueue(
        stream, [=] { move_bytes(to, from, bytes, false, pinned_target); }, "a copy", to_host ? bytes : 0);
  }
  if (to_host && !pinned_target) synchronise(stream, "a copy to pageable memory");
}

PointPtr record(Stream& stream) {
  Machine& m = machine();
  note_call();
  auto point = std::make_shared<Point>();
  point->stream = &stream;
  const std::lock_guard lock(m.mutex);
  push(m, stream, {.what = "a record", .record = point});
  return point;
}

void wait(Stream& stream, const PointPtr& point) {
  if (!point) return;
  Machine& m = machine();
  note_call();
  const std::lock_guard lock(m.mutex);
  if (point->capture) {
    if (stream.capture && stream.capture != point->capture) {
      throw DeviceFault(kCaptureIsolation, "an event of another capture");
    }
    stream.capture = point->capture;  // the stream joins it
    return;
  }
  if (stream.capture) {
    stream.capture->broken = true;
    throw DeviceFault(kCaptureIsolation, "a captured stream waits for work outside the capture");
  }
  push(m, stream, {.what = "a wait", .wait = point});
}

bool reached(const PointPtr& point) {
  if (!point) return true;
  Machine& m = machine();
  note_call();
  const std::lock_guard lock(m.mutex);
  if (point->capture) throw DeviceFault(kCapturedEvent, "an event of a capture was queried");
  if (m.stopping) return true;
  if (point->reached) return m.copy_speed == 0 || point->at <= m.host_now;
  // Whoever asks again and again sees the device move on.
  if (m.random() % 4 == 0) {
    std::erase_if(m.wanted, [](const PointPtr& each) { return each->reached; });
    m.wanted.push_back(point);
    m.work.notify_one();
  }
  return false;
}

void refuse_if_forbidden(const char* who) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (!m.forbidden) return;
  m.violations.push_back(std::string("a synchronisation: ") + who);
  throw DeviceFault(kNotPermitted, std::string("a synchronisation while they are forbidden: ") + who);
}

void synchronise(const PointPtr& point, const char* who) {
  if (!point) return;
  Machine& m = machine();
  note_call();
  std::unique_lock lock(m.mutex);
  if (device_thread) throw DeviceFault(kNotPermitted, std::string(who) + " in a host function");
  if (point->capture) throw DeviceFault(kCaptureUnsupported, "a captured event was waited for");
  ++m.counts.synchronisations;
  if (m.forbidden) {
    m.violations.push_back(std::string("a synchronisation: ") + who);
    throw DeviceFault(kNotPermitted, std::string("a synchronisation while they are forbidden: ") + who);
  }
  if (!point->reached) {
    m.wanted.push_back(point);
    m.work.notify_one();
    m.done.wait(lock, [&] { return point->reached || m.stopping || forked; });
    std::erase(m.wanted, point);
  }
  m.host_now = std::max(m.host_now, point->at);
  note_call();
  refuse_after_error(m);
}

void synchronise(Stream& stream, const char* who) {
  if (stream.capture) throw DeviceFault(kCaptureUnsupported, std::string(who) + " on a captured stream");
  synchronise(record(stream), who);
}

void synchronise_device(int device, const char* who) {
  Machine& m = machine();
  std::vector<PointPtr> points;
  std::vector<Stream*> streams;
  {
    const std::lock_guard lock(m.mutex);
    for (const auto& stream : m.streams) {
      if (stream->device == device && !stream->queue.empty()) streams.push_back(stream.get());
    }
    for (Stream* stream : streams) {
      auto point = std::make_shared<Point>();
      point->stream = stream;
      push(m, *stream, {.what = "a record", .record = point});
      points.push_back(point);
    }
  }
  if (points.empty()) points.push_back(record(default_stream(device)));
  for (const PointPtr& point : points) synchronise(point, who);
}

Clock::time_point time_of(const PointPtr& point) {
  const std::lock_guard lock(machine().mutex);
  return point->at;
}

// ------------------------------------------------------------------------------------------- capturing

void begin_capture(Stream& stream, bool global) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  stream.capture = std::make_shared<Capture>();
  stream.capture->global = global;
  m.captures.push_back(stream.capture);
}

std::shared_ptr<Graph> end_capture(Stream& stream) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const auto capture = stream.capture;
  if (!capture) throw DeviceFault(kInvalidValue, "the stream is not captured");
  for (const auto& each : m.streams) {
    if (each->capture == capture) each->capture.reset();
  }
  if (capture->broken) throw DeviceFault(901, "the capture was spoilt by a call that it forbids");
  return std::make_shared<Graph>(std::move(capture->graph));
}

bool capturing(const Stream& stream) noexcept { return stream.capture != nullptr; }

bool& relaxed() noexcept {
  thread_local bool yes = false;
  return yes;
}

bool capture_forbids(const char* who) {
  if (relaxed()) return false;
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  bool forbids = false;
  for (const auto& stream : m.streams) {
    if (stream->capture && stream->capture->global) {
      stream->capture->broken = forbids = true;
      m.violations.push_back(std::string(who) + " during a capture");
    }
  }
  return forbids;
}

void replay(Stream& stream, const Graph& graph) {
  for (const auto& [work, what] : graph) enqueue(stream, work, what);
}

// ----------------------------------------------------------------------------------------------- host

Pinned pinned(const void* address, std::size_t bytes) {
  const std::lock_guard lock(machine().mutex);
  return pinned_locked(machine(), reinterpret_cast<std::uintptr_t>(address), bytes);
}

int pin(void* address, std::size_t bytes) {
  Machine& m = machine();
  if (bytes == 0) return kInvalidValue;
  std::this_thread::sleep_for(std::chrono::milliseconds(m.faults.registration_ms));
  const auto begin = reinterpret_cast<std::uintptr_t>(address) / kPage * kPage;
  const auto end = (reinterpret_cast<std::uintptr_t>(address) + bytes + kPage - 1) / kPage * kPage;
  const std::lock_guard lock(m.mutex);
  if (pinned_locked(m, begin, end - begin) != Pinned::no) return kAlreadyRegistered;
  if (m.counts.registered_bytes + (end - begin) > m.faults.register_at_most) return kMemoryAllocation;
  m.counts.registered_bytes += end - begin;
  m.pinned[begin] = {end, false};
  mark_pages(reinterpret_cast<void*>(begin), end - begin);
  return 0;
}

int unpin(void* address) {
  Machine& m = machine();
  const auto begin = reinterpret_cast<std::uintptr_t>(address) / kPage * kPage;
  const std::lock_guard lock(m.mutex);
  const auto found = m.pinned.find(begin);
  if (found == m.pinned.end() || found->second.second) return kNotRegistered;
  const std::size_t bytes = found->second.first - begin;
  if (m.watching_pages && !pages_marked(reinterpret_cast<void*>(begin), bytes)) {
    m.violations.push_back("pages were unmapped while they were registered");
  }
  unmark_pages(reinterpret_cast<void*>(begin), bytes);
  m.counts.registered_bytes -= bytes;
  m.pinned.erase(found);
  return 0;
}

void* allocate_pinned(std::size_t bytes) {
  Machine& m = machine();
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  std::vector<std::pair<void*, std::size_t>> over;
  {
    const std::lock_guard lock(m.mutex);
    std::erase_if(m.limbo, [&](auto& each) {
      if (!std::all_of(each.first.begin(), each.first.end(), [](const auto& p) { return p->reached; }))
        return false;
      over.push_back(each.second);
      return true;
    });
    for (const auto& [at, length] : over) m.pinned.erase(reinterpret_cast<std::uintptr_t>(at));
  }
  for (const auto& [at, length] : over) munmap(at, length);
  void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  std::memset(at, kPoison, bytes);
  const std::lock_guard lock(m.mutex);
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  m.pinned[begin] = {begin + size, true};
  return at;
}

void free_pinned(void* address, std::vector<PointPtr> users) {
  Machine& m = machine();
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  std::size_t size = 0;
  {
    const std::lock_guard lock(m.mutex);
    const auto found = m.pinned.find(begin);
    if (found == m.pinned.end() || !found->second.second) {
      m.violations.push_back("pinned memory is freed that was not allocated");
      return;
    }
    size = found->second.first - begin;
    std::erase_if(users, [](const PointPtr& point) { return point->reached; });
    if (!users.empty()) {
      m.limbo.push_back({std::move(users), {address, size}});
      return;
    }
    m.pinned.erase(found);
  }
  munmap(address, size);
}

// -------------------------------------------------------------------------------------------- watching

Counts& counts() { return machine().counts; }
Faults& faults() { return machine().faults; }

void forbid_synchronisation(bool forbid) {
  const std::lock_guard lock(machine().mutex);
  machine().forbidden = forbid;
}

void watch_pages(bool watch) {
  const std::lock_guard lock(machine().mutex);
  machine().watching_pages = watch;
}

void set_virtual_clock(double bytes_per_second) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  m.copy_speed = bytes_per_second;
  m.host_now = Clock::now();
}

bool synchronisation_forbidden() { return machine().forbidden; }

void violate(const std::string& what) {
  const std::lock_guard lock(machine().mutex);
  machine().violations.push_back(what);
}

std::vector<std::string> violations() {
  const std::lock_guard lock(machine().mutex);
  return machine().violations;
}

std::string sticky_error() {
  const std::lock_guard lock(machine().mutex);
  return machine().sticky;
}

bool on_device_thread() noexcept { return device_thread; }

}  // namespace pretend
