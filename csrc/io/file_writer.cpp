#include "io/file_writer.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "core/check.h"

namespace dynswap {

namespace {

std::exception_ptr not_written(const char* why) {
  return std::make_exception_ptr(SourceError(std::string("a file was not written: ") + why));
}

}  // namespace

bool PendingWrite::done() const noexcept {
  const std::lock_guard lock(mutex_);
  return done_;
}

bool PendingWrite::wait(std::optional<std::chrono::seconds> patience) noexcept {
  const auto over = [this] { return done_; };
  std::unique_lock lock(mutex_);
  return patience ? over_.wait_for(lock, *patience, over) : over_.wait(lock, over);
}

std::exception_ptr PendingWrite::error() const noexcept {
  const std::lock_guard lock(mutex_);
  return error_;
}

void PendingWrite::end(std::exception_ptr error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);  // before the other: a child may be forked in between
    done_ = true;
  }
  over_.notify_all();
}

std::shared_ptr<PendingWrite> FileWriter::write(std::shared_ptr<const File> file, std::uint64_t offset,
                                                std::shared_ptr<const std::byte> src, std::size_t bytes,
                                                EventPtr after, std::shared_ptr<const void> owner) {
  static constexpr std::chrono::microseconds kPause{50};
  auto write = std::make_shared<PendingWrite>();
  WorkerPool::Task task;
  task.run = [this, write, offset, bytes, file = std::move(file), src = std::move(src),
              after = std::move(after), owner = std::move(owner)] {
    while (after && !after->done()) {
      if (write->given_up_.load(std::memory_order_relaxed))
        return write->end(not_written("the device has failed"));
      if (ending_.load(std::memory_order_relaxed)) return write->end(not_written("its install has ended"));
      std::this_thread::sleep_for(kPause);
    }
    std::exception_ptr error;
    try {
      file->write(offset, src.get(), bytes);
    } catch (...) {
      error = std::current_exception();
    }
    write->end(std::move(error));
  };
  task.cancel = [write] { write->end(not_written("its install has ended")); };
  if (!pool_.submit(std::move(task))) throw ClosedError("files are written by the process that opened them");
  return write;
}

}  // namespace dynswap
