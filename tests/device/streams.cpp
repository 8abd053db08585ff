// Streams, what is queued on them and waits for it, and captures.
#include <algorithm>
#include <numeric>

#include "machine_state.h"

namespace pretend {

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
  if (++m.counts.host_functions == m.faults.fail_host_function)
    throw DeviceFault(kInvalidValue, "this host function is refused");
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

std::vector<std::size_t> any_order(std::size_t count) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  std::shuffle(order.begin(), order.end(), m.random);
  return order;
}

bool reached(const PointPtr& point) {
  if (!point) return true;
  Machine& m = machine();
  note_call();
  const std::lock_guard lock(m.mutex);
  if (point->capture) throw DeviceFault(kCapturedEvent, "an event of a capture was queried");
  if (m.stopping) return true;
  if (point->reached) return m.copy_speed == 0 || point->at <= m.host_now;
  if (m.drops_work) return false;
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
  if (on_device_thread()) throw DeviceFault(kNotPermitted, std::string(who) + " in a host function");
  if (point->capture) throw DeviceFault(kCaptureUnsupported, "a captured event was waited for");
  ++m.counts.synchronisations;
  if (m.forbidden) {
    m.violations.push_back(std::string("a synchronisation: ") + who);
    throw DeviceFault(kNotPermitted, std::string("a synchronisation while they are forbidden: ") + who);
  }
  if (m.drops_work) point->reached = true;
  if (!point->reached) {
    m.wanted.push_back(point);
    m.work.notify_one();
    m.done.wait(lock, [&] { return point->reached || m.stopping || forked_child(); });
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

namespace {

bool break_captures(const char* who, bool all) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  bool broken = false;
  for (const auto& stream : m.streams) {
    if (stream->capture && (all || stream->capture->global)) {
      stream->capture->broken = broken = true;
      m.violations.push_back(std::string(who) + " during a capture");
    }
  }
  return broken;
}

}  // namespace

bool capture_forbids(const char* who) { return !relaxed() && break_captures(who, false); }
bool capture_forbids_all(const char* who) { return break_captures(who, true); }

bool capture_under_way() {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  return std::ranges::any_of(m.streams, [](const auto& stream) { return capturing(*stream); });
}

void replay(Stream& stream, const Graph& graph) {
  for (const auto& [work, what] : graph) enqueue(stream, work, what);
}

}  // namespace pretend
