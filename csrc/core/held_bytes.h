// Memory that belongs to somebody else, kept until the last who reads it is done.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "platform/fork_safe.h"

namespace dynswap {

/// Note [Bytes that outlive their storage]: a storage of torch may let go of its memory while the storage
/// itself lives on: `share_memory()`, `untyped_storage().resize_(0)`. To own the storage is therefore not to
/// own the bytes, and an engine that reads ahead would read what has been freed; were it page-locked too, the
/// device would go on reading the old pages behind what is next at that address. So for as long as somebody
/// streams from it, the context by which a storage frees its memory is exchanged for a share in this object,
/// which keeps the one that was there. The bytes stay where they are, and so does the pointer to them. The
/// last share to go, the storage's own or that of a copy under way, first ends the page-locking and then
/// frees.
///
/// Note [Whose context may be exchanged]: torch tells some memory by how it is freed (shared memory, files,
/// lazy copies), and would not know it again. Only what its ordinary allocator gave is held, and what
/// this package has mapped (tensor/shared_memory.h).
class HeldBytes {
 public:
  /// How memory is freed: what a torch DataPtr holds beside the pointer.
  using Context = std::unique_ptr<void, void (*)(void*)>;
  /// Page-locks the bytes, for as long as its result lives; null if that is refused.
  using Locker = std::function<std::shared_ptr<void>()>;

  HeldBytes() = default;
  HeldBytes(const HeldBytes&) = delete;
  HeldBytes& operator=(const HeldBytes&) = delete;

  // LOCK: the caller's (the GIL) guards contexts, and so these three.

  /// Takes a share in what `context` frees. Each hold() is to be followed by one leave().
  static std::shared_ptr<HeldBytes> hold(Context& context);
  /// Null if the context is not an exchanged one.
  static std::shared_ptr<HeldBytes> of(const Context& context) noexcept;
  /// With the last leave(), `context` becomes what it was before the first hold(), if it is still the one
  /// that was exchanged. Null: the storage is gone.
  void leave(Context* context) noexcept;

  /// How the memory is freed in the end.
  void (*deleter() const noexcept)(void*) { return original_.get_deleter(); }

  // Thread-safe. The driver may take seconds, so these are called without the GIL, and by no access.

  /// Page-locks the bytes unless they are; false if that was refused. Each success is to be followed by one
  /// unlock().
  bool lock(const Locker& locker);
  /// Keeps bytes locked that are page-locked already, until the unlock() that is to follow. False if they are
  /// not locked.
  bool lock_again();
  void unlock() noexcept;
  bool locked();

 private:
  static void drop_share(void* bytes) noexcept;

  Context original_{nullptr, nullptr};  ///< LOCK: as above
  int holders_ = 0;                     ///< LOCK: as above
  std::shared_ptr<HeldBytes> share_;    ///< the storage's own, while its context is the exchanged one

  Mutex changing_;                ///< held while the driver works: who wants the same memory waits for that
  int locks_ = 0;                 ///< LOCK: changing_
  std::shared_ptr<void> locked_;  ///< LOCK: changing_. After original_, so that it goes first.
};

}  // namespace dynswap
