// Processes of one host that run the same program, each with a device of its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"

namespace dynswap {

/// What torch.distributed does for GatheredCopies. The collectives are called in the same order by all ranks.
class Ranks {
 public:
  /// What a rank tells the others.
  using Words = std::array<std::int64_t, 4>;
  /// What all ranks have told, on its way.
  class Told {
   public:
    virtual ~Told() = default;
    /// By rank. Blocks until all have told it. Throws if a rank does not within the group's timeout.
    virtual std::vector<Words> wait() = 0;
  };

  virtual ~Ranks() = default;
  virtual std::size_t rank() const noexcept = 0;
  virtual std::size_t size() const noexcept = 0;
  /// The number of one of these ranks among all ranks of the program, by which people know it.
  virtual std::size_t number_of(std::size_t rank) const noexcept { return rank; }

  /// The stream on which all_gather() works; of no meaning on the host.
  virtual Stream stream() const noexcept = 0;
  /// Completes `memory`, on the device: size() parts of `part` bytes, of which this rank has its own.
  /// Enqueues it on stream(); on the host, blocks until it is done. Throws if a rank does not take part in
  /// time; then nothing writes to `memory` any more.
  virtual void all_gather(std::byte* memory, std::size_t part) = 0;

  /// Begins to tell the others.
  virtual std::unique_ptr<Told> tell(const Words& words) = 0;

  /// Tells that this rank has begun a pass. May block for as long as a message takes, as do the calls below.
  virtual void note_pass(std::uint64_t pass) = 0;
  /// Whether any rank has begun it.
  virtual bool begun(std::uint64_t pass) = 0;

  /// Leaves a sentence about this rank for others that miss it; after a failure, they do not wait for it
  /// longer.
  virtual void note(const std::string& state, bool failed = false) noexcept = 0;
  /// What the other ranks have left, as the end of a message. It says so of one that cannot be asked.
  virtual std::string states() noexcept = 0;
};

}  // namespace dynswap
