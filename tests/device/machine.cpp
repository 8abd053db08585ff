// The machine itself: its one thread, and the order in which it runs what streams hold.
#include "machine.h"

#include <pthread.h>

#include <algorithm>

#include "machine_state.h"

namespace pretend {

namespace {

constexpr auto kIdle = std::chrono::milliseconds(3);

std::atomic<bool> forked{false};
thread_local bool device_thread = false;

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

}  // namespace

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

bool forked_child() noexcept { return forked; }

void push(Machine& m, Stream& stream, Stream::Entry entry) {
  if (forked) throw DeviceFault(3, "initialization error");
  begin_thread(m);
  if (stream.capture) {
    if (entry.wait) return;  // the capture's order is that of the calls
    if (entry.record) entry.record->capture = stream.capture;
    if (entry.work) stream.capture->graph.emplace_back(std::move(entry.work), entry.what);
    return;
  }
  if (m.drops_work) {
    if (entry.record) m.recorded.push_back(std::move(entry.record));
    for (; m.recorded.size() > m.under_way; m.recorded.pop_front()) m.recorded.front()->reached = true;
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

void note_call() noexcept {
  if (!machine().drops_work) machine().last_call = Clock::now().time_since_epoch().count();
}

// -------------------------------------------------------------------------------------------- watching

Counts counts() {
  const std::lock_guard lock(machine().mutex);
  return machine().counts;
}
void count(std::uint64_t Counts::* what, std::int64_t more) {
  const std::lock_guard lock(machine().mutex);
  machine().counts.*what += static_cast<std::uint64_t>(more);
}
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
  m.host_now = std::max(m.host_now, Clock::now());
  for (const auto& stream : m.streams) m.host_now = std::max(m.host_now, stream->now);
}

void drop_work(bool drop, std::size_t under_way) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  for (const PointPtr& point : std::exchange(m.recorded, {})) point->reached = true;
  m.drops_work = drop;
  m.under_way = under_way;
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
