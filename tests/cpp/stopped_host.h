// What the tests of the host backend share: sources, and workers that can be stopped.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "host/host_backend.h"
#include "io/file.h"

namespace dynswap::test {

/// Stops workers inside a copy: a cast of the gate's source waits until the gate opens.
class Gate {
 public:
  static void reset() {
    const std::lock_guard lock(mutex_);
    open_ = false;
    waiting_ = 0;
    order_.clear();
  }
  static void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  static void wait_until_reached() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [] { return waiting_ > 0; });
  }
  /// First elements of the casts, in the order in which they ran.
  static std::vector<int> order() {
    const std::lock_guard lock(mutex_);
    return order_;
  }

  /// f32 to f16: the first 16 bits. An f8 source is the gate. An f64 source notes its first byte.
  static void cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count) {
    const auto* in = static_cast<const std::byte*>(src);
    auto* out = static_cast<std::byte*>(dst);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t bytes = std::min(scalar_size(dst_type), scalar_size(src_type));
      std::memcpy(out + i * scalar_size(dst_type), in + i * scalar_size(src_type), bytes);
    }
    std::unique_lock lock(mutex_);
    if (src_type == Scalar::f64) order_.push_back(static_cast<int>(in[0]));
    if (src_type == Scalar::f8_e5m2) {
      ++waiting_;
      changed_.notify_all();
      changed_.wait(lock, [] { return open_; });
    }
  }

 private:
  static inline std::mutex mutex_;
  static inline std::condition_variable changed_;
  static inline bool open_ = false;
  static inline int waiting_ = 0;
  static inline std::vector<int> order_;
};

inline SourcePtr ram_source(const std::byte* address, std::uint64_t count, Scalar stored, Scalar wanted,
                            std::shared_ptr<const void> owner = {}) {
  auto source = std::make_shared<Source>();
  source->name = "ram";
  source->address = address;
  source->count = count;
  source->stored = stored;
  source->wanted = wanted;
  source->owner = std::move(owner);
  return source;
}

inline SourcePtr file_source(std::shared_ptr<const File> file, std::uint64_t offset, std::uint64_t count,
                             Scalar stored = Scalar::raw8, Scalar wanted = Scalar::raw8) {
  auto source = std::make_shared<Source>();
  source->name = "file.weight";
  source->file = std::move(file);
  source->offset = offset;
  source->count = count;
  source->stored = stored;
  source->wanted = wanted;
  return source;
}

inline CopyRequest request(SourcePtr source, std::byte* dst, std::vector<EventPtr> after = {},
                           bool demanded = false) {
  CopyRequest result;
  const std::uint64_t count = source->count;
  result.steps.push_back({std::move(after), {{std::move(source), 0, count, dst}}});
  result.demanded = demanded;
  return result;
}

/// One worker is stopped in its first copy: if it is the only one, what is copied meanwhile stays queued.
class Stopped {
 public:
  explicit Stopped(int threads = 1) : backend(&Gate::cast, threads, /*at_once=*/0) {
    Gate::reset();
    gate = backend.copy(request(ram_source(&byte_, 1, Scalar::f8_e5m2, Scalar::raw8), &sink_));
    Gate::wait_until_reached();
  }
  ~Stopped() { Gate::open(); }

  /// A copy that Gate::order() shows as `mark`.
  EventPtr noted(int mark, std::vector<EventPtr> after = {}, bool demanded = false) {
    auto bytes = std::make_shared<std::vector<std::byte>>(8, static_cast<std::byte>(mark));
    return backend.copy(request(ram_source(bytes->data(), 1, Scalar::f64, Scalar::f32, bytes),
                                reinterpret_cast<std::byte*>(&slots_[mark]), std::move(after), demanded));
  }

 private:
  std::byte byte_{};
  std::byte sink_{};
  std::array<std::uint32_t, 256> slots_{};

 public:
  HostBackend backend;
  EventPtr gate;
};

}  // namespace dynswap::test
