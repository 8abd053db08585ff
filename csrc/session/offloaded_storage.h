// What stands in a graph for saved tensors that may leave the device: a storage, and views of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/engine.h"
#include "session/offload.h"
#include "session/saved.h"

namespace dynswap {

/// A storage that the graph has, wherever its bytes are.
struct OffloadedStorage {
  explicit OffloadedStorage(std::shared_ptr<SavedOffload> of) : offload(std::move(of)) {}
  ~OffloadedStorage();
  OffloadedStorage(const OffloadedStorage&) = delete;
  OffloadedStorage& operator=(const OffloadedStorage&) = delete;

  /// Whether its bytes are those that a view shows now.
  bool has_bytes_of(const c10::VariableVersion& version) const;
  /// Another view of it is saved, on the stream on which the thread works.
  void add(const c10::VariableVersion& version);
  void add_reader();
  void note_versions();
  /// Returns its bytes on the device, for a backward whose forward the thread `reader` ran.
  c10::Storage bring(std::thread::id reader);

  const std::shared_ptr<SavedOffload> offload;
  std::shared_ptr<Engine> engine;
  WeightId id = 0;
  const c10::StorageImpl* identity = nullptr;
  c10::weak_intrusive_ptr<c10::StorageImpl> original{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::intrusive_ptr<c10::StorageImpl> held;  ///< null once it has left
  std::size_t bytes = 0, index = 0;
  std::shared_ptr<Source> host;         ///< null: it has not left
  std::shared_ptr<std::byte> copy;      ///< its bytes on the host, until `offered`; null: straight in a file
  std::shared_ptr<PendingWrite> write;  ///< from `copy` to a file, until `offered`; null: none
  EventPtr written;                     ///< the end of the copy from the device
  std::vector<c10::Stream> streams;     ///< on which its views were saved, or it left
  /// Version counters of the views that are saved, and their values as the storage left.
  std::vector<std::pair<c10::VariableVersion, std::uint32_t>> versions;
  bool leaving = false;         ///< its bytes are being copied, and other threads run
  bool offered = false;         ///< the engine brings it back from `host`
  bool departing = false;       ///< a copy to the host may be under way
  bool held_elsewhere = false;  ///< it was at its place in the step before: it stays, and does not count
  bool passed = false;          ///< backward has come to it
  std::size_t views = 0, unpacked = 0;  ///< how many stand in graphs, and have been asked for
  c10::Storage back;                    ///< what came back, until each view has been unpacked

 private:
  c10::Storage from_engine(std::thread::id reader);
  c10::Storage without_engine();
  void use_here(const c10::Storage& brought) const;
};

/// What stands in the graph for one view of it.
struct SavedView final : Saved {
  SavedView(std::shared_ptr<OffloadedStorage> of, const at::Tensor& tensor);
  ~SavedView() override;
  at::Tensor unpack() override;

  const std::shared_ptr<OffloadedStorage> storage;
  const SavedOriginal original;
  std::shared_ptr<at::Tensor> shown;  ///< what was returned last: see SavedOffload::note_shown()
  const at::TensorOptions like;
  const std::vector<std::int64_t> sizes, strides;
  const std::int64_t offset;
  const bool conjugate, negative;
  const c10::VariableVersion version;
  const std::uint32_t saved_version;
  const std::thread::id reader = std::this_thread::get_id();  ///< whose order backward takes up
  bool unpacked = false;
};

}  // namespace dynswap
