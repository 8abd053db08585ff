// The backend without a GPU: worker threads that read, copy and cast into RAM.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/backend.h"
#include "core/scalar.h"
#include "host/copy_queue.h"
#include "io/aligned_buffer.h"
#include "io/file.h"

namespace dynswap {

/// The device is RAM and its consumers are the calling threads: wait() blocks, and what a thread has been
/// given is done when the call returns, so record() has nothing to say (null).
/// All calls are thread-safe; close() and the destructor are called once, and last.
class HostBackend final : public Backend {
 public:
  /// `cast` converts between element types; `threads` read at one time. More threads than cores are
  /// right: most of their time they wait for the disk. Copies of `at_once` bytes at most need none, as a
  /// rule.
  explicit HostBackend(CastFn cast, int threads = 4, std::size_t at_once = 64u << 10)
      : copies_(cast, threads, at_once) {}

  /// Handed-out tensors begin where kernels choose as they do on torch's own memory. A copy begins within
  /// some 5 us, in this thread or a worker that is awake.
  static constexpr DeviceTraits kTraits{kDirectAlign, 64, kSmallRead, 32u << 10};

  const char* name() const noexcept override { return "host"; }
  const DeviceTraits& traits() const noexcept override { return kTraits; }
  Memory allocate(std::size_t bytes) override;
  EventPtr copy(CopyRequest request) override { return copies_.copy(std::move(request)); }
  void wait(Stream, const EventPtr& copied) override { copies_.wait(copied); }
  EventPtr record(Stream) override { return nullptr; }
  EventPtr mark(Stream) override;
  void close() noexcept override { copies_.close(); }
  void synchronise(const EventPtr& event) noexcept override { copies_.synchronise(event); }
  std::uint64_t host_synchronisations() const noexcept override { return 0; }

 private:
  CopyQueue copies_;
};

}  // namespace dynswap
