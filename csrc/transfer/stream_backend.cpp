#include "transfer/stream_backend.h"

#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/protection.h"
#include "transfer/copy_plan.h"

namespace dynswap {

StreamBackend::StreamBackend(const char* name, std::shared_ptr<TransferStream> stream,
                             std::unique_ptr<CopyIssuer> issuer)
    : name_(name), stream_(std::move(stream)), issuer_(std::move(issuer)) {}

StreamBackend::~StreamBackend() {
  if (!devices_usable()) {
    // At exit, and in a forked child, whose threads exist no more: nothing to stop, nobody to tell.
    (void)issuer_.release();
    return;
  }
  close();
  try {
    const OnDevice scope(device());
    issuer_.reset();
  } catch (const std::exception&) {
    (void)issuer_.release();  // the device is lost
  }
}

EventPtr StreamBackend::copy(CopyRequest request) {
  struct Counted {
    std::atomic<int>& count;
    explicit Counted(std::atomic<int>& copying) : count(copying) { ++count; }
    ~Counted() { --count; }
  };
  const Counted counted(copying_);
  if (closed_) throw ClosedError("the backend is closed");
  reap();
  refresh_pinned_copies(request);
  const OnDevice scope(device());
  const StreamEventPtr copied = stream_->make_event(clock());
  try {
    issuer_->issue(request, copied);
  } catch (...) {
    // What was enqueued before the error must not outlive the request.
    stream_->synchronise();
    throw;
  }
  for (Step& step : request.steps) step.after.clear();
  const std::lock_guard lock(mutex_);
  in_flight_.push_back({copied, std::move(request.steps)});
  return copied;
}

/// Note [A read can fail after its copy was issued]: the consumer's work would then run over bytes that
/// never came, and the error would be known too late. So wait() blocks the calling thread until the reads
/// (not the copies) of a staged copy are over, and throws what went wrong. Prefetched reads are over by
/// then, or the disk is the limit. The engine counts the time as a stall; it is no synchronisation with
/// the device. Copies of pinned sources have no reads.
void StreamBackend::wait(Stream consumer, const EventPtr& copied) {
  if (!copied) return;
  const StreamEvent& event = on_stream(copied);
  if (event.reads && PROTECTED(failed_read_told)) issuer_->wait(*event.reads);
  event.wait_for_record();  // throws what made the copy fail
  if (event.known_done()) return;
  const OnDevice scope(device());
  const StreamHandle stream = device().handle_of(consumer);
  if (!device().captured(stream)) return event.block(stream);
  // See Note [Somebody captures a graph]; replays will find it there.
  if (event.done()) return;
  stream_->count_host_synchronisation();
  event.synchronise();
}

EventPtr StreamBackend::record(Stream consumer) { return record(consumer, nullptr); }

EventPtr StreamBackend::record(Stream consumer, std::shared_ptr<const StreamClock> clock) {
  const OnDevice scope(device());
  const StreamEventPtr event = stream_->make_event(std::move(clock));
  event->record(device().handle_of(consumer));
  return event;
}

bool StreamBackend::capturing(Stream consumer) const noexcept {
  if (!devices_usable()) return false;
  try {
    const OnDevice scope(device());
    return device().captured(device().handle_of(consumer));
  } catch (const std::exception&) {
    return false;  // the device is lost, or knows no captures
  }
}

void StreamBackend::keep_times(bool keep) {
  if (closed_ || !devices_usable()) return;
  if (keep) stream_->count_host_synchronisation();
  auto started =
      keep ? std::make_shared<const StreamClock>(stream_->device_ptr(), stream_->handle()) : nullptr;
  const std::lock_guard lock(mutex_);
  clock_.swap(started);
}

std::shared_ptr<const StreamClock> StreamBackend::clock() const {
  const std::lock_guard lock(mutex_);
  return clock_;
}

EventPtr StreamBackend::mark(Stream consumer) {
  std::shared_ptr<const StreamClock> timed_by = clock();
  if (!timed_by || capturing(consumer)) return nullptr;
  return record(consumer, std::move(timed_by));
}

/// Lets go of the sources of copies that are over. On a thread that issues copies, because the last owner
/// of a master's memory must not be the driver's thread, where no call is allowed. The stream is in order, so
/// the first that is not over ends the search: a host that is far ahead of the device asks for one event, not
/// for all that are under way.
void StreamBackend::reap() noexcept {
  for (;;) {
    StreamEventPtr oldest;
    {
      const std::lock_guard lock(mutex_);
      if (in_flight_.empty()) return;
      oldest = in_flight_.front().copied;
    }
    if (!oldest->done()) return;
    InFlight over;  // freed without the lock
    const std::lock_guard lock(mutex_);
    if (in_flight_.empty() || in_flight_.front().copied != oldest) continue;
    over = std::move(in_flight_.front());
    in_flight_.pop_front();
  }
}

void StreamBackend::close() noexcept {
  if (closed_.exchange(true) || !devices_usable()) return;
  issuer_->close();  // reads that have not begun fail, so nothing below waits for a disk
  while (copying_ > 0) std::this_thread::yield();
  if (PROTECTED(close_waits)) stream_->synchronise();
  issuer_->release_memory();  // a handle may outlive its install
  reap();
}

}  // namespace dynswap
