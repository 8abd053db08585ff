#include "host/copy_queue.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <mutex>
#include <optional>
#include <utility>

#include "core/check.h"
#include "io/file.h"
#include "io/reader.h"

namespace dynswap {

namespace {

std::exception_ptr closed_error() {
  return std::make_exception_ptr(ClosedError("the host backend was closed before the weights had arrived"));
}

}  // namespace

/// A step.
struct CopyQueue::Part {
  std::vector<Chunk> chunks;  ///< constant until the copy is over
  // LOCK: the queue's mutex.
  std::vector<std::shared_ptr<Copy>> after;  ///< those that were not over when the copy was made
  std::size_t waits = 0;                     ///< of `after`, those that are not over
  std::size_t chunks_left = 0;
};

struct CopyQueue::Copy final : Event {
  bool done() const noexcept override { return over.load(std::memory_order_acquire); }
  std::optional<Interval> when() const noexcept override {
    if (!done() || began == 0) return std::nullopt;
    return Interval{began, ended};
  }

  std::atomic<bool> urgent{false};
  std::atomic<bool> failed{false};  ///< the chunks that have not begun are skipped
  std::atomic<bool> over{false};
  std::atomic<std::int64_t> began{0};  ///< the first of its chunks; 0: none has
  std::int64_t ended = 0;              ///< constant once `over` is set
  // LOCK: the queue's mutex. Invariant: `error` does not change any more once `over` is set.
  std::vector<Part> parts;
  std::size_t parts_left = 0;
  std::exception_ptr error;
  std::vector<PartRef> dependants;  ///< parts that wait for this copy

  void fail(std::exception_ptr with) {
    if (!error) error = std::move(with);
    failed.store(true, std::memory_order_relaxed);
  }
};

CopyQueue::CopyQueue(CastFn cast, int threads, std::size_t at_once)
    : cast_(cast), at_once_(at_once), pool_(threads) {}

CopyQueue::~CopyQueue() { close(); }

EventPtr CopyQueue::copy(CopyRequest request) {
  read_policy_.reading(ReadPolicy::Clock::now());
  if (is_short(request)) return copy_at_once(request);
  auto copy = std::make_shared<Copy>();
  copy->parts.resize(request.steps.size());
  copy->parts_left = request.steps.size();
  for (std::size_t i = 0; i < request.steps.size(); ++i) {
    Part& part = copy->parts[i];
    part.chunks = cut_into_chunks(request.steps[i].pieces);
    part.chunks_left = part.chunks.size();
  }
  std::vector<PartRef> ready;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw ClosedError("the host backend is closed");
    for (std::size_t i = 0; i < request.steps.size(); ++i) {
      Part& part = copy->parts[i];
      for (const EventPtr& event : request.steps[i].after) {
        if (!event || event->done()) continue;
        part.after.push_back(std::static_pointer_cast<Copy>(event));
        part.after.back()->dependants.push_back({copy, i});
      }
      part.waits = part.after.size();
      if (part.waits == 0) ready.push_back({copy, i});
    }
  }
  if (request.demanded) promote(copy);
  queue(std::move(ready));
  return copy;
}

bool CopyQueue::is_short(const CopyRequest& request) const {
  std::size_t bytes = 0;
  for (const Step& step : request.steps) {
    for (const EventPtr& event : step.after) {
      if (event && !event->done()) return false;
    }
    for (const Piece& piece : step.pieces) {
      const Source& source = *piece.source;
      bytes += std::max(stored_bytes(piece), piece.count * scalar_size(source.wanted));
      if (bytes > at_once_ || (source.mapped && !source.file)) return false;
    }
  }
  const auto in_ram = [](const Piece& piece) {
    const Source& source = *piece.source;
    if (!source.file) return true;
    const StoredRange range = source.stored_range(piece.first, piece.count);
    return source.keep != Keep::no && source.file->is_cached(source.offset + range.begin, range.bytes());
  };
  return std::all_of(request.steps.begin(), request.steps.end(), [&](const Step& step) {
    return std::all_of(step.pieces.begin(), step.pieces.end(), in_ram);
  });
}

EventPtr CopyQueue::copy_at_once(const CopyRequest& request) {
  auto copy = std::make_shared<Copy>();
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw ClosedError("the host backend is closed");
    ++made_at_once_;
  }
  std::vector<const Chunk*> chunks;
  for (const Step& step : request.steps) chunks.push_back(&step.pieces);
  std::exception_ptr error = bring(*copy, chunks, ReadMode::quick);
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    if (error) copy->fail(std::move(error));
    copy->ended = monotonic_ns();
    copy->over.store(true, std::memory_order_release);
    last = --made_at_once_ == 0 && closed_;
  }
  if (last) over_.notify_all();
  return copy;
}

/// Returns what made it fail, if anything did.
std::exception_ptr CopyQueue::bring(Copy& copy, const std::vector<const Chunk*>& chunks, ReadMode mode) {
  try {
    std::int64_t none = 0;
    if (copy.began.load(std::memory_order_relaxed) == 0)
      copy.began.compare_exchange_strong(none, monotonic_ns());
    std::vector<PieceRead> reads;
    for (const Chunk* const chunk : chunks) {
      for (const Piece& piece : *chunk) reads.push_back({&piece, piece.dst});
    }
    read_pieces(reads, cast_, mode);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

void CopyQueue::queue(std::vector<PartRef> ready) {
  for (std::size_t next = 0; next < ready.size(); ++next) {  // `ready` grows on the way
    const PartRef ref = ready[next];
    const std::size_t chunks = ref.copy->parts[ref.index].chunks.size();
    std::size_t queued = 0;
    std::exception_ptr error;
    try {
      while (queued < chunks && submit(ref, queued)) ++queued;
      if (queued < chunks) error = closed_error();
    } catch (...) {
      error = std::current_exception();
    }
    if (queued < chunks || chunks == 0) {
      std::vector<PartRef> more = chunks_over(ref, chunks - queued, std::move(error));
      ready.insert(ready.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
    }
  }
}

bool CopyQueue::submit(const PartRef& ref, std::size_t chunk) {
  const Copy& copy = *ref.copy;
  const bool urgent = copy.urgent.load();
  const bool queued = pool_.submit({[this, ref, chunk] { run(ref, chunk); },
                                    [this, ref] { queue(chunks_over(ref, 1, closed_error())); }, &copy},
                                   urgent);
  // It may have become urgent since, when the task was not there yet to be promoted.
  if (queued && !urgent && copy.urgent.load()) pool_.promote(&copy);
  return queued;
}

void CopyQueue::run(const PartRef& ref, std::size_t chunk) {
  std::exception_ptr error;
  if (!ref.copy->failed.load(std::memory_order_relaxed))
    error = bring(*ref.copy, {&ref.copy->parts[ref.index].chunks[chunk]}, read_policy_.mode());
  queue(chunks_over(ref, 1, std::move(error)));
}

/// `count` chunks of a part are over: brought, failed, or skipped. Returns the parts that this makes ready.
std::vector<CopyQueue::PartRef> CopyQueue::chunks_over(const PartRef& ref, std::size_t count,
                                                       std::exception_ptr error) {
  std::vector<PartRef> ready;
  std::vector<Part> finished;  // outlives the lock: what a source's owner does when it goes is not known here
  {
    const std::lock_guard lock(mutex_);
    Copy& copy = *ref.copy;
    if (error) copy.fail(std::move(error));
    Part& part = copy.parts[ref.index];
    part.chunks_left -= count;
    if (part.chunks_left > 0 || --copy.parts_left > 0) return ready;
    finished.swap(copy.parts);
    for (PartRef& dependant : copy.dependants) {
      if (--dependant.copy->parts[dependant.index].waits == 0) ready.push_back(std::move(dependant));
    }
    copy.dependants.clear();
    copy.ended = monotonic_ns();
    copy.over.store(true, std::memory_order_release);
  }
  over_.notify_all();
  return ready;
}

void CopyQueue::promote(const std::shared_ptr<Copy>& copy) {
  std::vector<std::shared_ptr<Copy>> promoted;
  {
    const std::lock_guard lock(mutex_);
    const auto add = [&](const std::shared_ptr<Copy>& found) {
      if (!found->done() && !found->urgent.exchange(true)) promoted.push_back(found);
    };
    add(copy);
    for (std::size_t next = 0; next < promoted.size(); ++next) {
      const std::shared_ptr<Copy> waiting = promoted[next];
      for (const Part& part : waiting->parts) {
        for (const std::shared_ptr<Copy>& event : part.after) add(event);
      }
    }
  }
  // What is waited for comes first.
  for (auto it = promoted.rbegin(); it != promoted.rend(); ++it) pool_.promote(it->get());
}

void CopyQueue::wait(const EventPtr& event) {
  if (!event) return;
  const auto copy = std::static_pointer_cast<Copy>(event);
  if (!copy->done()) {
    const auto begin = ReadPolicy::Clock::now();
    promote(copy);
    synchronise(event);
    if (!copy->done()) throw ClosedError(kOnlyInParent);
    read_policy_.waited(ReadPolicy::Clock::now() - begin);
  }
  if (copy->failed.load(std::memory_order_relaxed)) std::rethrow_exception(copy->error);
}

void CopyQueue::synchronise(const EventPtr& event) noexcept {
  if (!event || event->done()) return;
  std::unique_lock lock(mutex_);
  static_cast<void>(over_.wait(lock, [&] { return event->done(); }));
}

void CopyQueue::close() noexcept {
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    static_cast<void>(over_.wait(lock, [&] { return made_at_once_ == 0; }));
  }
  // Each dropped chunk fails its copy; what waited for that copy finds the pool closed, and fails too.
  pool_.close();
}

}  // namespace dynswap
