#include "accelerator/events.h"

#include <mutex>
#include <new>
#include <utility>

#include "accelerator/device_runtime.h"
#include "accelerator/torch_calls.h"
#include "core/check.h"
#include "transfer/device_errors.h"
#include "transfer/usable_devices.h"

namespace dynswap {

TorchClock::TorchClock(const c10::Stream& stream)
    : zero_(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT) {
  torch_calls([&] {
    zero_.record(stream);
    zero_.synchronize();
  });
  host_ns_ = monotonic_ns();
}

std::optional<Interval> TorchClock::interval(const c10::Event& first, const c10::Event& last) const noexcept {
  const auto nanoseconds = [](double milliseconds) { return static_cast<std::int64_t>(1e6 * milliseconds); };
  try {
    const std::int64_t end = host_ns_ + nanoseconds(zero_.elapsedTime(last));
    return Interval{end - nanoseconds(first.elapsedTime(last)), end};
  } catch (const std::exception&) {
    return std::nullopt;  // the device is lost, or cannot time events
  }
}

TorchEventPool::~TorchEventPool() {
  if (devices_usable()) return;
  for (auto& events : free_) {
    for (auto& event : events) (void)event.release();  // the runtime may be gone
  }
}

std::unique_ptr<c10::Event> TorchEventPool::take(bool timed) {
  {
    const std::lock_guard lock(mutex_);
    auto& free = free_[timed];
    if (!free.empty()) {
      std::unique_ptr<c10::Event> event = std::move(free.back());
      free.pop_back();
      return event;
    }
  }
  return std::make_unique<c10::Event>(
      type_, timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
}

void TorchEventPool::give_back(std::unique_ptr<c10::Event> event, bool timed) noexcept {
  if (!devices_usable()) {
    (void)event.release();
    return;
  }
  try {
    const std::lock_guard lock(mutex_);
    free_[timed].push_back(std::move(event));
  } catch (const std::bad_alloc&) {
    // it is destroyed
  }
}

void TorchEvent::record(const c10::Stream& stream) {
  torch_calls([&] { event_->record(stream); });
  state_.store(State::recorded, std::memory_order_release);
  state_.notify_all();
}

void TorchEvent::fail(std::exception_ptr error) noexcept {
  error_ = std::move(error);
  done_.store(true, std::memory_order_release);
  state_.store(State::failed, std::memory_order_release);
  state_.notify_all();
}

void TorchEvent::wait_for_record() const {
  if (!recorded() && forks() != made_after_)  // the thread that would record it is not in this process
    throw ClosedError(kOnlyInParent);
  state_.wait(State::pending, std::memory_order_acquire);
  if (state_.load(std::memory_order_acquire) == State::failed) std::rethrow_exception(error_);
}

void TorchEvent::block(const c10::Stream& stream) const {
  if (known_done()) return;
  torch_calls([&] { event_->block(stream); });
}

void TorchEvent::synchronise() const {
  if (known_done()) return;
  const RelaxedCapture relaxed;
  torch_calls([&] { event_->synchronize(); });
  done_.store(true, std::memory_order_release);
}

std::optional<Interval> TorchEvent::when() const noexcept {
  if (!clock_ || !devices_usable() || !done() || error_) return std::nullopt;
  return clock_->interval(begin ? *begin->event_ : *event_, *event_);
}

bool TorchEvent::done() const noexcept {
  if (known_done()) return true;
  if (!devices_usable()) return true;
  if (!recorded()) return false;
  try {
    const RelaxedCapture relaxed;
    if (!event_->query()) return false;
  } catch (const c10::AcceleratorError& error) {
    // Whatever else keeps the question from being answered says nothing about the work before the event.
    if (!ends_all_work(error.get_error_code())) return false;
  } catch (const std::exception&) {
    return false;  // it was not asked
  }
  done_.store(true, std::memory_order_release);
  return true;
}

}  // namespace dynswap
