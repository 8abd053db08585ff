// Memory of masters that one session keeps alive and page-locked.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/held_bytes.h"
#include "core/source.h"
#include "transfer/pinned_copies.h"

namespace dynswap {

/// Note [A copy keeps its source page-locked]
/// An engine waits for its copies before it ends the page-locking of their sources. It knows nothing of what
/// torch copies: a read that no plan serves any more, say, because another thread has just replaced the
/// install. To a device, torch copies from page-locked memory without looking at it again, so that must not
/// become ordinary memory meanwhile. Whoever has torch copy a master holds one of these.
///
/// LOCK: the GIL, in both the constructor and the destructor. Where bytes are held for an engine, they do
/// without it while the driver works for another thread.
class KeptLocked {
 public:
  /// For a copy to `device`. To the CPU's memory it makes no difference what is page-locked.
  KeptLocked(const at::Tensor& master, const at::Device& device);
  ~KeptLocked();
  KeptLocked(const KeptLocked&) = delete;
  KeptLocked& operator=(const KeptLocked&) = delete;

 private:
  c10::Storage storage_;
  std::shared_ptr<HeldBytes> bytes_;  ///< null if no engine has them
  bool locked_ = false;
};

/// LOCK: the GIL. pin() and end() release it while the driver works, and nothing that an access takes is
/// held meanwhile.
class MasterMemory {
 public:
  MasterMemory() = default;
  ~MasterMemory() { end(); }
  MasterMemory(const MasterMemory&) = delete;
  MasterMemory& operator=(const MasterMemory&) = delete;

  /// Makes room for so many storages, which are about to be held.
  void expect(std::size_t storages);

  /// What keeps the bytes of this storage where they are, whatever becomes of the storage (Note [Bytes that
  /// outlive their storage]); of memory that may not be held, the storage itself.
  std::shared_ptr<const void> hold(const c10::Storage& storage);

  /// Whether the storage's memory is torch's ordinary allocator's, or map_shared_tensor()'s (Note [Whose
  /// context may be exchanged]).
  static bool can_hold(const c10::Storage& storage);

  /// Page-locks the sources for the backend of this name as far as it may be, and replaces them by ones that
  /// say so. Returns what is to be told the user. Their owners are from hold().
  std::string pin(const at::Device& device, const std::string& backend, PinnedCopies& copies,
                  std::vector<SourcePtr>& sources);

  /// Whether the bytes of this source are page-locked through somebody's pin().
  bool pinned(const Source& source) const;

  /// Unlocks all, and leaves the storages as they were. Only once no copy reads them any more.
  void end() noexcept;

  /// In a forked child, where another thread may have been in the middle of it: forgets all.
  void abandon() noexcept;

 private:
  struct Held {
    std::weak_ptr<HeldBytes> bytes;  ///< weak, so that memory which its storage has let go of can be freed
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int locks = 0;
  };

  std::unordered_map<const void*, Held> held_;  ///< by their HeldBytes
  std::size_t sweep_at_ = 64;                   ///< entries, among which there may be dead ones
};

}  // namespace dynswap
