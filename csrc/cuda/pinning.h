// Which pages of this process are page-locked for the device.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/context.h"

namespace dynswap {

/// A run of whole pages that one call registers.
struct PageRun {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

/// Bytes that shall be page-locked, and what keeps them where they are.
struct Lockable {
  const std::byte* address = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const void> owner;
};

/// Note [One registration at a page]: the driver refuses to register a page twice, and a copy that spans
/// two registrations. So pages are shared between the weights, models and engines of a process:
/// registrations are disjoint and counted, and a copy is cut where one ends (run_length()).
///
/// Note [Registered pages stay mapped]: memory that is unmapped while it is registered, and mapped anew,
/// has new pages behind the same addresses, and the device goes on reading the old ones. So a
/// registration owns every tensor that lies on its pages, until it is given up. Small neighbours share
/// one; a large tensor has its own, so that its replacement frees it.
///
/// Thread-safe. No call is made under the mutex: who finds pages that another thread is about to register
/// or unregister waits for that.
class PinRegistry {
 public:
  /// The registry of this process, since pages are the process's. Never destroyed: the last handle may be
  /// let go at exit.
  static PinRegistry& of_this_process();

  /// What keeps a set of ranges page-locked.
  class Handle;

  /// The page runs that would be registered for `ranges`: each page once, none over kLongestRun, and
  /// neighbours together only while they are small. Static, so that it can be tested without a device.
  static std::vector<PageRun> runs(const std::vector<Lockable>& ranges, std::size_t page_bytes);

  /// Registers what is not registered yet. `locked[i]` tells whether all of `ranges[i]` is; `reason` is the
  /// first refusal.
  std::shared_ptr<Handle> lock(const std::shared_ptr<const DeviceContext>& context,
                               const std::vector<Lockable>& ranges, std::vector<bool>& locked,
                               std::string& reason);

  /// How many of the `bytes` at `address` can be copied at once: up to the end of the registration.
  /// `bytes` where there is none (memory that somebody else has page-locked).
  std::size_t run_length(const std::byte* address, std::size_t bytes) const;

  /// One call for more has been seen to fail on some kernels at 2 GiB.
  static constexpr std::size_t kLongestRun = std::size_t{1} << 30;
  static constexpr std::size_t kSmall = std::size_t{2} << 20;
  static constexpr std::size_t kLongestSharedRun = std::size_t{64} << 20;

 private:
  struct Registration {
    std::uintptr_t end = 0;
    std::size_t handles = 0;
    enum class State { changing, locked } state = State::changing;
    std::vector<std::shared_ptr<const void>> owners;
  };
  using Registrations = std::map<std::uintptr_t, Registration>;  // by their first byte; disjoint

  void unlock(Handle& handle) noexcept;
  Registrations::iterator first_reaching(std::uintptr_t address);
  bool changing(const PageRun& run);
  void take(const PageRun& run, Handle& handle, std::vector<PageRun>& gaps);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Registrations registrations_;  ///< LOCK: mutex_
};

}  // namespace dynswap
