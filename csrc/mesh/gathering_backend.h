// The backend of an engine whose copies are shared out among ranks.
#pragma once

#include <atomic>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/backend.h"
#include "mesh/gathered_copies.h"
#include "platform/fork_safe.h"

namespace dynswap {

/// The end of a copy that is gathered. Fields are set before `state`: by the thread of GatheredCopies, and
/// after a failure by copy_whole_again().
class GatheredCopies::Gathered final : public Event {
 public:
  enum class State : std::uint8_t { queued, issued, failed };

  Gathered(std::shared_ptr<Backend> on, SharedGroupPtr of, std::byte* to, std::vector<Piece> of_this_rank,
           std::uint64_t bytes_read, std::vector<EventPtr> comes_after)
      : read(bytes_read),
        inner(std::move(on)),
        group(std::move(of)),
        base(to),
        own(std::move(of_this_rank)),
        after(std::move(comes_after)) {}

  bool done() const noexcept override;
  std::optional<Interval> when() const noexcept override;
  std::optional<std::uint64_t> bytes_read() const noexcept override { return read; }

  const std::uint64_t read;        ///< bytes of masters
  std::shared_ptr<Backend> inner;  ///< LOCK: GatheredCopies::mutex_; null: any, and not known yet
  SharedGroupPtr group;            ///< null once it is gathered
  std::byte* base;                 ///< null: the scratch
  std::vector<Piece> own;          ///< behind what all ranks have; none once it is gathered
  std::vector<EventPtr> after;     ///< what the memory is free after
  bool started = false;
  EventPtr share;  ///< the copy of this rank's part
  EventPtr end;    ///< of what was enqueued; null on the host
  Interval host_time;
  std::exception_ptr error;
  std::atomic<State> state{State::queued};
};

class GatheringBackend final : public Backend {
 public:
  GatheringBackend(std::shared_ptr<GatheredCopies> copies, std::shared_ptr<Backend> inner)
      : copies_(std::move(copies)), inner_(std::move(inner)) {}
  ~GatheringBackend() override { copies_->let_go_of(*inner_); }

  const char* name() const noexcept override { return inner_->name(); }
  const DeviceTraits& traits() const noexcept override { return inner_->traits(); }
  bool asks_for_whole_groups() const noexcept override { return true; }
  Memory allocate(std::size_t bytes) override { return inner_->allocate(bytes); }
  bool release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept override;
  Stream order_of(const Memory& memory) const noexcept override { return inner_->order_of(memory); }
  EventPtr copy(CopyRequest request) override;
  void wait(Stream consumer, const EventPtr& copied) override;
  EventPtr record(Stream consumer) override { return inner_->record(consumer); }
  bool capturing(Stream consumer) const noexcept override { return inner_->capturing(consumer); }
  std::int64_t now() const noexcept override { return inner_->now(); }
  void keep_times(bool keep) override;
  bool device_time() const noexcept override { return inner_->device_time(); }
  EventPtr mark(Stream consumer) override { return inner_->mark(consumer); }
  void close() noexcept override;
  void synchronise(const EventPtr& event) noexcept override;
  std::uint64_t host_synchronisations() const noexcept override { return inner_->host_synchronisations(); }

 private:
  struct Known {
    std::vector<SourcePtr> sources;
    SharedGroupPtr group;
  };

  void set_times();

  const std::shared_ptr<GatheredCopies> copies_;
  const std::shared_ptr<Backend> inner_;
  std::atomic<bool> times_wanted_{false};  ///< by the engine
  std::atomic<bool> measured_{false};      ///< by GatheredCopies
  Mutex times_mutex_;                      ///< held while they are set
  Mutex mutex_;
  std::unordered_map<std::uint32_t, Known> known_;  ///< LOCK: mutex_
};

}  // namespace dynswap
