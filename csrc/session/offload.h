// Tensors that autograd has saved leave the device, and come back for backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/engine.h"
#include "io/file_writer.h"
#include "io/scratch_file.h"
#include "session/saved.h"

namespace dynswap {

struct OffloadedStorage;

/// Note [Saved tensors leave the device]
/// What the operations of a forward save for backward takes device memory until backward has used it. Of
/// these tensors, those that exceed a limit are copied to the host and let go; backward has them back as it
/// has weights back, through the engine (Note [Short-lived groups]).
/// - Backward needs first what was saved last. So what was saved first leaves, and what was saved last stays,
///   as far as three quarters of the limit go; the last quarter is for what is on its way. How much has to
///   leave is known from the step before: so much leaves as soon as it is saved. If all of it fits within the
///   limit, nothing moves. In a first step, the oldest leave when three quarters are reached.
/// - What moves is a storage, once, whatever views of it are saved. A view that is saved after it left is one
///   of the same bytes if its version says that they have not changed. Else the storage is moved again: parts
///   of one may be written in turn, each with a version of its own (`unsafe_chunk`, as in a GRU).
/// - A storage that somebody else still has when backward comes to it (the caller's input, what a module
///   keeps) is used as it is. In the next step, what was saved at that place does not move, nor does it
///   count, until nobody else has it when backward comes to it.
/// - Parameters, tensors that are no plain strided memory, and small ones stay, and so does what a backward
///   saves: what is computed again is needed at once.
/// - On the host they lie in page-locked memory, as far as the installs' `host_budget` allows. The rest goes
///   to a file, if there is a folder for it, or to pageable memory, for whose copies the host waits.
/// - What goes to a file is copied to a buffer first, and written by other threads. The caller waits for the
///   disk once a quarter of the limit lies in buffers. On the CPU, the caller itself writes what the page
///   cache has room for (that is a copy within the RAM, too), and what a buffer would exceed the limit for.
/// - Memory is let go after the copy out of it, in the order of the streams that saved it, so that the host
///   does not wait.
class SavedOffload : public std::enable_shared_from_this<SavedOffload> {
 public:
  /// `limit`: bytes that saved tensors may take on `device`. `folder`: of the file that takes what no
  /// page-locked memory does; empty: there is none, and `warn` is told once of the pageable memory.
  /// `keep`: whether its file may be in the page cache.
  SavedOffload(const at::Device& device, std::size_t limit, const std::string& folder, bool page_locks,
               Keep keep, std::function<void(const std::string&)> warn);
  ~SavedOffload();
  SavedOffload(const SavedOffload&) = delete;
  SavedOffload& operator=(const SavedOffload&) = delete;

  /// What stands in the graph for the tensor; null if it stays. LOCK: the GIL, as for all below.
  std::unique_ptr<Saved> keep(std::shared_ptr<Engine> engine, const at::Tensor& tensor);

  /// An outermost call of the model begins: of a step, if nothing is saved.
  void call_begins() noexcept;
  /// Lets go of all that is on its way out, and of files that no graph needs; waits for the copies.
  void finish() noexcept;
  /// A new plan has another limit.
  void set_limit(std::size_t bytes) noexcept { limit_ = bytes; }
  /// The slowest place of what has left.
  const char* where() const noexcept;

  struct Figures {
    std::uint64_t out_bytes = 0;   ///< copied to the host
    std::uint64_t in_bytes = 0;    ///< copied back without an engine
    std::uint64_t peak_bytes = 0;  ///< most on the device at one time, of what is saved and on its way out
    std::uint64_t step_bytes = 0;  ///< that the latest step saved, wherever they were
  };
  const Figures& figures() const noexcept { return figures_; }
  void reset_figures() noexcept { figures_ = {.step_bytes = figures_.step_bytes}; }

 private:
  friend struct OffloadedStorage;
  friend struct SavedView;

  /// Memory from which a copy may be under way.
  struct Departing {
    c10::intrusive_ptr<c10::StorageImpl> storage;
    std::size_t bytes = 0;
    std::shared_ptr<Engine> engine;
    EventPtr written;
    std::vector<c10::Stream> streams;
    std::weak_ptr<OffloadedStorage> of;
  };
  /// Bytes in a buffer, which are being written to a file.
  struct Buffered {
    std::weak_ptr<OffloadedStorage> of;
    std::shared_ptr<PendingWrite> write;
    std::shared_ptr<Engine> engine;
    EventPtr copied;
    std::size_t bytes = 0;
  };
  /// Room on the host.
  struct Place {
    std::shared_ptr<Source> source;
    std::shared_ptr<std::byte> copy;  ///< where the bytes are copied to; null: they are written to the file
    bool pinned = false;              ///< `copy` is
  };
  bool can_leave(const at::Tensor& tensor) const;
  Place place_on_host(std::size_t bytes);
  void make_room();
  void leave(const std::shared_ptr<OffloadedStorage>& storage);
  void let_go();
  /// The engine brings it back from now on: from the buffer, if its file does not have it yet, or does not
  /// take it. Nothing if it does already.
  void offer(OffloadedStorage& storage);
  /// Waits until it is written. The next keep() throws what went wrong.
  void take_oldest_buffered();
  /// A graph that is kept has saved tensors that it has returned. While a gradient may be made of one, it is
  /// held once more: else autograd would take its memory for the gradient's, as if nobody else had it.
  void note_shown(std::shared_ptr<at::Tensor>& kept_by, const at::Tensor& tensor, std::size_t bytes);
  const OffloadedStorage* newest(const c10::StorageImpl* storage) const;
  void let_go_of_arrived();
  Departing take_oldest_departing();
  void gone(OffloadedStorage& storage) noexcept;
  void note_bytes() noexcept;

  const at::Device device_;
  std::size_t limit_;
  const std::size_t least_;  ///< bytes; what has no more stays
  const std::string folder_;
  const bool pinned_;
  const Keep keep_;
  const std::function<void(const std::string&)> warn_;
  bool said_pageable_ = false;
  std::optional<c10::Stream> out_;  ///< the stream of the copies to the host; none on the CPU
  // Made when they are needed.
  std::shared_ptr<ScratchFile> cached_file_;
  std::shared_ptr<ScratchFile> direct_file_;  ///< past the page cache
  std::unique_ptr<FileWriter> writer_;

  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<OffloadedStorage>> known_;
  std::deque<std::weak_ptr<OffloadedStorage>> here_;  ///< those that may leave, in the order of saving
  std::deque<Departing> departing_;
  std::deque<Buffered> buffered_;
  std::deque<std::pair<std::weak_ptr<at::Tensor>, std::size_t>> shown_;  ///< with their bytes
  std::size_t shown_bytes_ = 0;
  std::size_t held_bytes_ = 0;  ///< of those that have not left
  std::size_t departing_bytes_ = 0;
  std::size_t buffered_bytes_ = 0;
  std::exception_ptr failure_;    ///< of a write to a file, until keep() throws it
  std::weak_ptr<Engine> engine_;  ///< that has brought, or will bring, what was saved last

  // A step begins with a call while nothing is saved, and ends when the last storage that was is gone.
  std::size_t alive_ = 0;
  std::size_t index_ = 0;                    ///< storages of this step
  std::size_t saved_in_step_ = 0;            ///< bytes
  std::size_t left_in_step_ = 0;             ///< bytes
  std::optional<std::size_t> last_step_;     ///< bytes that were saved in the step before
  std::vector<std::size_t> held_elsewhere_;  ///< by index: the bytes of one that somebody else has; 0: nobody
  Figures figures_;
};

}  // namespace dynswap
