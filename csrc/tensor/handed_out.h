// Tensors on the device as the model's code sees them, and what becomes of what is written on them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/engine.h"
#include "io/memory_watch.h"
#include "platform/fork_safe.h"
#include "tensor/master.h"
#include "tensor/small_blocks.h"

namespace dynswap {

class MasterContent;
class Server;
class Sharing;
struct MasterRecord;

/// What a handed-out tensor's storage owns: its lease (or its own memory), and the way back to the
/// master. Dies with the storage, on whichever thread lets go last.
class HandedOut : public OutsideTheHeap {
 public:
  /// Whose bytes were handed out, and by whom.
  struct Origin {
    std::weak_ptr<Server> server;
    std::shared_ptr<MasterRecord> master;  ///< never null
  };

  /// The record of a tensor to come, with the master as it is now: asking for the bytes
  /// lets other threads run.
  static std::unique_ptr<HandedOut> of_weight(const Origin& origin, const at::Tensor& master,
                                              const at::Device& device);
  /// A tensor over the leased bytes, shaped and strided as the master, of the type that is asked for.
  static at::Tensor make(std::unique_ptr<HandedOut> record, Lease lease);
  /// A tensor over the leased bytes, which `earlier` may have too (null: there is none). `watched`: the bytes
  /// are watched from the start, as after watch_bytes().
  static at::Tensor make(std::unique_ptr<HandedOut> record, Lease lease, const HandedOut* earlier,
                         bool watched);
  /// A converted copy with memory of its own, which keeps `counted` for as long.
  static at::Tensor make_private(const Origin& origin, const at::Tensor& master, const at::Device& device,
                                 std::shared_ptr<void> counted = nullptr);
  /// The record of a tensor made here, or null if its storage is another one by now.
  static HandedOut* of(const c10::TensorImpl& tensor) noexcept;
  static HandedOut* of(const c10::StorageImpl& storage) noexcept;
  /// Another tensor over the bytes of one that is gone; `storage` is the one that it left.
  static at::Tensor again(c10::intrusive_ptr<c10::StorageImpl> storage, const at::Tensor& master);
  /// Another tensor over the bytes of one that is gone, as is its storage; its `record` was kept.
  static at::Tensor again(std::unique_ptr<HandedOut> record, const at::Tensor& master);

  ~HandedOut();
  HandedOut(const HandedOut&) = delete;
  HandedOut& operator=(const HandedOut&) = delete;

  /// Notes that the calling thread's current stream uses the tensor too.
  void use_here();
  /// Notes that another stream uses the tensor, in an order that the user has made, as Tensor.record_stream()
  /// has it.
  void record_stream(const c10::Stream& stream);

  const Origin& origin() const noexcept { return origin_; }  ///< LOCK: the GIL
  /// Goes to another record of the same master, which a later plan or a later server has.
  void belong_to(Origin origin) noexcept { origin_ = std::move(origin); }
  at::ScalarType dtype() const noexcept { return options_.dtype().toScalarType(); }
  bool leased() const noexcept { return static_cast<bool>(lease_); }
  /// Whether the bytes are those that this engine hands out: not a copy of its own, nor one of an earlier
  /// plan.
  bool leased_from(const Engine& engine) const noexcept { return lease_.from(engine); }
  bool on_cpu() const noexcept { return options_.device().is_cpu(); }
  /// The master's bytes and version counter; not the master itself, which nothing here keeps.
  const at::Tensor& master() const noexcept { return master_; }
  const std::shared_ptr<Sharing>& sharing() const noexcept { return sharing_; }
  const std::shared_ptr<MasterContent>& content() const noexcept { return content_; }
  /// Whether the master is still what was handed out, as far as can be told.
  bool master_unchanged() const;

  /// From now on the bytes tell whether the tensor was written, not its version: F.batch_norm writes its
  /// running statistics and bumps nothing. Counted: each watch() needs one unwatch(). See Note [Statistics
  /// are written back together].
  void watch() noexcept { ++watchers_; }
  void unwatch() noexcept { --watchers_; }
  void unwatch_all() noexcept { watchers_ = 0; }
  bool watched() const noexcept { return watchers_ > 0; }

  /// Watches the bytes, as somebody may write to them in ways that bump no version: NumPy, DLPack and views
  /// do, where the bytes are in RAM (Note [What is read outside a forward may be written by anybody]). Does
  /// nothing on other devices.
  void watch_bytes();

  /// Notes an alias of the tensor with a version counter of its own. See Note [Writes without a trace].
  void note_untracked_alias() noexcept { untracked_ = true; }
  bool has_untracked_alias() const noexcept { return untracked_; }
  /// Follows its master, which this tensor's own write has made plain, as its record has.
  void follow_plain();
  /// Notes that no alias with a version counter of its own is left.
  void no_untracked_alias() noexcept { untracked_ = false; }
  /// Adds a version counter that tells of writes too: that of an alias, or of a wrapper around the tensor.
  /// Thread-safe.
  void note_version_of_alias(const c10::VariableVersion& version);
  /// Whether the version tells of a write, or cannot tell. Quick: looks at no bytes.
  bool may_be_written() const noexcept { return untracked_ || watch_ || bumped(); }
  /// Whether its version, or that of an alias, tells of a write that the master does not have yet.
  bool bumped() const noexcept {
    return version_.current_version() != seen_version_ || (aliased_ && alias_bumped());
  }
  /// Notes that the tensor gets other bytes: a write to graphs that have saved these, and none to the master.
  void note_other_data() {
    version_.bump();
    seen_version_ = version_.current_version();
  }
  /// Whether what was written on the tensor went to the master in another dtype: a new copy would differ from
  /// it.
  bool rounded() const noexcept { return rounded_; }
  /// Whether the latest write_back() met a capture, and did nothing.
  bool postponed() const noexcept { return postponed_; }

  /// Writes back what was written in place. Does nothing if nothing was. If the master has been written
  /// itself since, that stands (masters are the truth), and the server is told what is lost. Returns the
  /// master's version after a write.
  /// Note [Written on any stream]: it reads what the streams have written that used the tensor, whatever
  /// stream is current where the tensor dies. During a capture of one of them it does nothing.
  /// `look`: the bytes tell whether it was written.
  /// Throws torch's errors. One that says that the device is lost is thrown once: what was written there is
  /// lost too, and the master, which is not, is to be had afterwards.
  std::optional<std::uint32_t> write_back(bool look = false);

  /// Queues the copy to the host that the next write_back() will take, on the device's current stream, so
  /// that many need one wait. False if there is nothing to take, as far as can be told without the bytes. Not
  /// on the CPU.
  bool start_write_back();
  /// Notes that the copy of start_write_back() is over.
  void note_arrived() noexcept { arrived_ = sent_.defined(); }
  c10::Device device() const noexcept { return options_.device(); }

 private:
  HandedOut(const Origin& origin, const at::Tensor& master, const at::Device& device);
  static at::Tensor finish(std::unique_ptr<HandedOut> record, const at::Tensor& master, bool watched = false);
  static at::Tensor tensor_over(c10::Storage storage, const HandedOut& record, const at::Tensor& master);
  bool written() const;
  bool alias_bumped() const noexcept;
  void note_versions() noexcept;
  at::Tensor view() const;
  at::Tensor readable_master() const;
  at::Tensor master_in_order() const;
  void note_master();
  at::Tensor on_host();
  std::optional<std::uint32_t> take_to_master(bool look);
  at::Tensor written_elements(const at::Tensor& now, const at::Tensor& flat) const;
  void note_before_if_small();
  void note_before(const at::Tensor& now, const at::Tensor& flat);
  void note_equal();
  void note_lost();
  void tell_lost() const;
  void begin_watch(bool is_written);
  void leave_watch() noexcept;
  bool note_user(const c10::Stream& stream);  ///< false: it is known
  bool wait_for_users();

  Lease lease_;
  Origin origin_;  ///< LOCK: the GIL
  at::Tensor own_;
  std::shared_ptr<void> counted_;  ///< Engine::count_outside(), or null
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  at::TensorOptions options_;
  at::Tensor master_;
  std::shared_ptr<MasterContent> content_;  ///< the master's (Note [A coded master]), or null
  const void* master_memory_ = nullptr;     ///< the start of its storage
  std::uint32_t master_version_ = 0;
  std::shared_ptr<Sharing> sharing_;  ///< the master's, or null
  std::uint32_t master_ours_ = 0;     ///< Sharing::Seen::ours, at `master_version_`
  bool mapped_ = false;               ///< the master's memory is a file's
  /// What was handed out, as the master has it and in the order of its copy, where other masters have some of
  /// its bytes: what differs from that was written here. Shared by all that have the same leased bytes.
  at::Tensor before_;
  std::shared_ptr<MemoryWatch> master_watch_;  ///< null if the master's bytes are not in host memory
  std::uint64_t master_writes_ = 0;            ///< the watch's count when both were last equal
  std::atomic<int> watchers_{0};
  std::atomic<bool> untracked_{false};
  struct Alias {
    c10::VariableVersion version;  ///< shared with the alias and its views
    std::uint32_t seen;
  };
  std::vector<Alias> aliases_;  ///< LOCK: one mutex for all records
  std::atomic<bool> aliased_{false};
  at::Tensor sent_;  ///< the bytes on the host, if `arrived_`
  bool arrived_ = false;
  bool rounded_ = false;
  bool postponed_ = false;
  bool gone_ = false;  ///< the device has given up all that was enqueued, and the bytes with it
  struct Users {
    Mutex mutex;
    std::vector<c10::Stream> streams;  ///< LOCK: mutex
  };
  PerProcess<Users> users_;       ///< the streams that have used it. None on the CPU, and in a forked child
  c10::VariableVersion version_;  ///< shared with the tensor and its views
  std::uint32_t seen_version_ = 0;
  std::uint64_t seen_sample_ = 0;       ///< of the bytes, in RAM, if nothing watches them
  std::shared_ptr<MemoryWatch> watch_;  ///< counts from 0
  std::uint64_t seen_writes_ = 0;       ///< the watch's count
};

}  // namespace dynswap
