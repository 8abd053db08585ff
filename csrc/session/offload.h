// Tensors that autograd has saved leave the device, and come back for backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/engine.h"
#include "io/scratch_file.h"
#include "session/saved.h"

namespace dynswap {

struct OffloadedStorage;

/// Note [Saved tensors leave the device]
/// What the operations of a forward save for backward takes device memory until backward has used it. Of
/// these tensors, those that exceed a limit are copied to the host and let go; backward has them back as it
/// has weights back, through the engine (Note [Short-lived groups]).
/// - Backward needs first what was saved last. So what was saved first leaves, and what was saved last stays,
///   as far as the limit goes. How much has to leave is known from the step before: so much leaves as soon as
///   it is saved. If all of it fits, nothing moves. In a first step, the oldest leave when the limit is
///   reached.
/// - What moves is a storage, once, whatever views of it are saved. A view that is saved after it left is one
///   of the same bytes if its version says that they have not changed. Else the storage is moved again: parts
///   of one may be written in turn, each with a version of its own (`unsafe_chunk`, as in a GRU).
/// - A storage that somebody else still has when backward comes to it (the caller's input, what a module
///   keeps) is used as it is. In the next step, what was saved at that place does not move.
/// - Weights, tensors that are no plain strided memory, and small ones stay.
/// - Memory is let go after the copy out of it, in the order of the stream that saved it, so that the host
///   does not wait. If several streams save, the host waits for the copy.
class SavedOffload : public std::enable_shared_from_this<SavedOffload> {
 public:
  /// `limit`: bytes that saved tensors may take on `device`. `folder`: for the CPU, where they go.
  SavedOffload(const at::Device& device, std::size_t limit, const std::string& folder);
  ~SavedOffload();
  SavedOffload(const SavedOffload&) = delete;
  SavedOffload& operator=(const SavedOffload&) = delete;

  /// What stands in the graph for the tensor; null if it stays. LOCK: the GIL, as for all below.
  std::unique_ptr<Saved> keep(const std::shared_ptr<Engine>& engine, const at::Tensor& tensor);

  /// An outermost call of the model begins: of a step, if nothing is saved.
  void call_begins() noexcept;

  struct Figures {
    std::uint64_t out_bytes = 0;   ///< copied to the host
    std::uint64_t in_bytes = 0;    ///< copied back without an engine
    std::uint64_t peak_bytes = 0;  ///< most on the device at one time, of what is saved and on its way out
  };
  const Figures& figures() const noexcept { return figures_; }
  void reset_figures() noexcept { figures_ = {}; }

 private:
  friend struct OffloadedStorage;
  friend struct SavedView;

  /// Memory from which a copy may be under way.
  struct Departing {
    c10::intrusive_ptr<c10::StorageImpl> storage;
    std::shared_ptr<void> host;
    std::shared_ptr<Engine> engine;
    EventPtr written;
    std::weak_ptr<OffloadedStorage> of;
  };
  bool can_leave(const at::Tensor& tensor) const;
  void make_room(Stream consumer);
  void leave(const std::shared_ptr<OffloadedStorage>& storage, Stream consumer);
  void let_go(Stream consumer);
  void let_go_of_arrived();
  Departing take_oldest_departing();
  void gone(OffloadedStorage& storage) noexcept;
  void note_bytes() noexcept;

  const at::Device device_;
  const std::size_t limit_;
  const std::size_t least_;  ///< bytes; what has no more stays
  const std::string folder_;
  const bool pinned_;
  std::optional<c10::Stream> out_;     ///< the stream of the copies to the host; none on the CPU
  std::shared_ptr<ScratchFile> file_;  ///< made when it is needed

  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<OffloadedStorage>> known_;
  std::deque<std::weak_ptr<OffloadedStorage>> here_;  ///< those that may leave, in the order of saving
  std::deque<Departing> departing_;
  std::size_t held_bytes_ = 0;  ///< of those that have not left
  std::size_t departing_bytes_ = 0;
  std::weak_ptr<Engine> engine_;    ///< that has brought, or will bring, what was saved last
  std::optional<Stream> saved_on_;  ///< the stream on which all were saved
  bool one_stream_ = true;

  // A step begins with a call while nothing is saved, and ends when the last storage that was is gone.
  std::size_t alive_ = 0;
  std::size_t index_ = 0;                 ///< storages of this step
  std::size_t saved_in_step_ = 0;         ///< bytes
  std::size_t left_in_step_ = 0;          ///< bytes
  std::optional<std::size_t> last_step_;  ///< bytes that were saved in the step before
  std::vector<std::size_t> of_others_;    ///< by index: the bytes of one that somebody else has; 0: nobody
  Figures figures_;
};

}  // namespace dynswap
