// Masters that lie in one storage, and what a write to one says of the others.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "io/elements.h"
#include "io/memory_watch.h"

namespace dynswap {

struct MasterRecord;

/// Note [A version may be of a neighbour's write]: views of one tensor share a version counter, also when
/// they have no byte in common: `flat[:4]` and `flat[4:]`, as flattened parameters and statistics are. A
/// write back to one bumps it, and what waits to be written back to the other would be dropped, as if its
/// master had been written by somebody else. So a counter that has moved is a question:
/// - Are all of these bumps write backs of ours, to masters without a byte of this one? Each is credited to
///   the others on its counter (`Seen::ours`). bump() finds them by their version.
/// - Has the user written to the neighbours? Where the master is a part of a storage, and its bytes are
///   watched so that no write goes unseen, the watch answers.
/// Masters that do overlap are one memory in plain torch, where a write to one is a write to both. So before
/// one is handed out or given away, what was written on the others is written back to it
/// (Session::write_back_overlapping()), and what two small ones wrote at the same time is put together by
/// element (HandedOut::before_).
///
/// One master among those that share its version counter or bytes. Thread-safe.
class Sharing {
  struct Private {};

 public:
  /// Where the values of a master are. Those of a coded one are in no memory, and have addresses that no
  /// memory has, also once it is plain: `MasterContent::place()`.
  struct Place {
    Elements elements;
    const std::byte* begin = nullptr;  ///< of the storage
    const std::byte* end = nullptr;
    bool page_locked = false;  ///< by the user: a device may write to it

    /// The place of a master that is copyable().
    static Place of(const at::Tensor& master);
  };

  /// Registers a master, so that those that share bytes with it are known.
  static std::shared_ptr<Sharing> of(const at::Tensor& master, Place place,
                                     const std::shared_ptr<MasterRecord>& record);
  Sharing(Private, const at::Tensor& master, Place place, const std::shared_ptr<MasterRecord>& record);
  ~Sharing();
  Sharing(const Sharing&) = delete;
  Sharing& operator=(const Sharing&) = delete;

  struct Seen {
    std::uint32_t version = 0;
    std::uint32_t ours = 0;  ///< of these bumps, those of our writes to others' bytes
  };
  Seen now() const;
  /// The present state, if nothing since `seen` was a write to this master. `watch` may be null; `writes` is
  /// its count at the time.
  std::optional<Seen> if_of_others(Seen seen, MemoryWatch* watch, std::uint64_t writes) const;
  /// Whether nothing but write backs to others bumped the version since.
  bool only_ours_since(Seen seen) const;
  /// Bumps the master's version, after a write back to its bytes.
  void bump();

  /// Whether other masters have some of its bytes. Quick.
  bool overlaps() const noexcept { return overlaps_.load(std::memory_order_relaxed); }
  /// The records of the masters that have some of this one's bytes.
  std::vector<std::shared_ptr<MasterRecord>> overlapping() const;

 private:
  bool has_bytes_of(const Sharing& other) const noexcept;

  const Place place_;
  const c10::TensorImpl* const master_;  ///< an identity, never dereferenced
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const std::weak_ptr<MasterRecord> record_;
  const c10::VariableVersion version_;  ///< shared with the master
  std::atomic<bool> overlaps_{false};
  std::uint32_t ours_ = 0;  ///< LOCK: that of all of them
};

}  // namespace dynswap
