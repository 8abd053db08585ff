// What is known of one master, and of what was handed out of it last.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/protection.h"
#include "io/memory_watch.h"
#include "tensor/master.h"
#include "tensor/master_content.h"
#include "tensor/sharing.h"

namespace dynswap {

/// A master as the tensors know it that are handed out of it, and who of them is the latest.
/// LOCK: the GIL guards every field.
struct MasterRecord : std::enable_shared_from_this<MasterRecord> {
  std::string name;
  at::ScalarType wanted = at::kFloat;      ///< in which dtype it is handed out
  MasterState state;                       ///< the master whose bytes have been copied
  c10::VariableVersion version;            ///< the master's counter, shared with it
  std::shared_ptr<MasterContent> content;  ///< null: the values are the master's own bytes
  std::shared_ptr<Sharing> sharing;        ///< null: it has no memory of its own
  std::uint32_t ours_seen = 0;             ///< Sharing::Seen::ours, at `state.version`
  bool mapped = false;                     ///< from a file (Note [A mapping outlives its file's end])
  std::shared_ptr<MemoryWatch> watch;      ///< of the master's bytes in RAM, if copies are made of them
  std::uint64_t writes_seen = 0;           ///< the watch's count at the last look
  /// The record's key in tables; one that takes the place of another has its number.
  std::uint64_t number = next_number();
  /// The latest tensor handed out, if somebody still has it: one access gives what the other gave.
  c10::weak_intrusive_ptr<c10::TensorImpl> latest{c10::intrusive_ptr<c10::TensorImpl>()};
  /// The storage of the latest tensor handed out; a view or an autograd graph may keep it when the tensor
  /// itself is gone.
  c10::weak_intrusive_ptr<c10::StorageImpl> latest_storage{c10::intrusive_ptr<c10::StorageImpl>()};

  /// LOCK: the GIL.
  static std::uint64_t next_number() noexcept {
    static std::uint64_t latest = 0;
    return ++latest;
  }

  /// From now on the record is of this master. `place`: of what copies are made; none: none are made.
  void follow(const at::Tensor& master, bool from_file, std::optional<Sharing::Place> place) {
    state = MasterState::of(*master.unsafeGetTensorImpl());
    version = master.unsafeGetTensorImpl()->version_counter();
    mapped = from_file;
    sharing = place ? Sharing::of(master, *std::move(place), shared_from_this()) : nullptr;
    note_version();
  }

  /// Notes that the next copy will be of the master as it is now.
  void note_master() {
    note_version();
    silently_written();
  }

  /// Notes that the master's version is known.
  void note_version() {
    if (!version.enabled()) return;
    const Sharing::Seen now =
        sharing ? sharing->now() : Sharing::Seen{.version = version.current_version(), .ours = 0};
    state.version = now.version;
    ours_seen = now.ours;
  }

  /// Takes the master's present version as seen, unless the master itself may have been written to since
  /// (Note [A version may be of a neighbour's write]).
  void follow_version() {
    if (!sharing || !version.enabled() || version.current_version() == state.version) return;
    const auto now = sharing->if_of_others({state.version, ours_seen}, watch.get(), writes_seen);
    if (!now) return;
    state.version = now->version;
    ours_seen = now->ours;
  }

  /// Whether other masters have some of this one's bytes.
  bool overlaps() const noexcept { return sharing && sharing->overlaps(); }

  /// Whether the master has been written to since this was last asked, also by a write that bumped no version
  /// (Note [Writes that bump no version]).
  bool silently_written() {
    if (!watch) return false;
    const std::uint64_t now = watch->writes();
    return std::exchange(writes_seen, now) != now && PROTECTED(silent_write_seen);
  }

  /// `of` watches the master's bytes; null if they are not in RAM.
  void watch_master(std::shared_ptr<MemoryWatch> of) {
    watch = std::move(of);
    writes_seen = watch ? watch->first_writes() : 0;
  }

  /// Whether the master was coded, and is plain by now (Note [A coded master]).
  bool became_plain() const { return content && content->became_plain(); }

  /// Whether the master is still what was copied, as far as can be told.
  bool master_unchanged() {
    if (became_plain()) return false;
    follow_version();
    if (!version.enabled() || version.current_version() != state.version) return false;
    return !watch || watch->writes() == writes_seen;
  }

  void remember(const at::Tensor& handed_out) {
    latest = c10::weak_intrusive_ptr<c10::TensorImpl>(handed_out.getIntrusivePtr());
    latest_storage = handed_out.storage().getWeakStorageImpl();
  }

  void forget_latest() noexcept {
    latest.reset();
    latest_storage.reset();
  }

  /// A weak pointer keeps the memory of what it pointed to. What is dead is let go soon. Returns false if it
  /// is not dead.
  bool drop_if_dead() {
    if (!latest_storage.expired()) return false;
    forget_latest();
    return true;
  }

  /// Whether somebody has what was handed out last, and the master is still that, as far as can be told.
  bool still_handed_out() { return !latest_storage.expired() && master_unchanged(); }
};

}  // namespace dynswap
