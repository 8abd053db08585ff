// How much of the host's RAM the weights of this process take, and how much they may.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace dynswap {

/// What is taken, beside the masters themselves.
enum class HostUse : std::uint8_t {
  locked,      ///< masters that are page-locked where they lie: no RAM of their own, but the system's no more
  copies,      ///< page-locked copies of masters
  staging,     ///< buffers between a disk, or pageable memory, and a device
  page_cache,  ///< what the system keeps of files that were read, or written, so
  activations,  ///< page-locked tensors that autograd has saved
};

inline constexpr std::size_t kHostUses = 5;

/// What one session was told. Those of all sessions hold for all of them together: the smallest of each.
struct HostLimits {
  std::size_t beside_masters = SIZE_MAX;  ///< all but what is locked in place
  std::size_t staging = 0;                ///< of which so much is for staging, now or later
  std::size_t locked = SIZE_MAX;          ///< in place, copies and activations
  /// Beyond those that there were when the limit was set. It is a share of the memory that was free then, so
  /// the largest of all sessions holds: that is the one that found the most.
  std::size_t copies = SIZE_MAX;
  std::size_t page_cache = SIZE_MAX;  ///< beyond what there was when the limit was set
};

/// The account of the process. Thread-safe. A forked child has an empty one.
class HostMemory {
 public:
  /// Sets limits, which hold while the result lives.
  static std::shared_ptr<const void> limit(const HostLimits& limits);

  /// Whether the bytes beside masters are limited, by an amount that somebody has named.
  static bool named();

  /// What has been taken, by HostUse.
  static std::array<std::size_t, kHostUses> used();

  /// Bytes of one use, which are given back when it goes.
  class Charge {
   public:
    explicit Charge(HostUse use) noexcept;
    ~Charge();
    Charge(const Charge&) = delete;
    Charge& operator=(const Charge&) = delete;

    /// Takes more, if there is room.
    bool grow(std::size_t bytes);
    /// Takes more, whether or not there is room: what nothing works without.
    void must_grow(std::size_t bytes);

   private:
    const HostUse use_;
    const unsigned process_;
    std::size_t bytes_ = 0;  ///< LOCK: the account's
  };

  /// Takes bytes while the result lives. Null, and nothing is taken, if there is no room.
  static std::shared_ptr<const Charge> charge(HostUse use, std::size_t bytes);
};

}  // namespace dynswap
