// One of several ranks that share out their copies, on the virtual clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "mesh/gathered_copies.h"
#include "sim/virtual_backend.h"

namespace dynswap::sim {

/// Ranks that all do the same at the same time, each over a bus of its own.
struct Mesh {
  std::size_t ranks = 2;
  double bytes_per_second = 0;  ///< at which each receives what the others have brought
};

/// What one rank's engine has for a backend: the real GatheredCopies over the virtual device. A gather takes
/// its time, and a copy's latency, on a stream of its own. The thread of GatheredCopies is a real one, so
/// virtual time stands still until it has issued what the engine asks for.
class VirtualMesh final : public Backend {
 public:
  VirtualMesh(std::unique_ptr<VirtualBackend> clock, const Mesh& mesh, double latency);
  ~VirtualMesh() override { copies_->close(); }

  void begin_pass() { copies_->begin_pass(); }
  GatheredCopies::Figures figures() const { return copies_->figures(); }

  const char* name() const noexcept override { return inner_->name(); }
  const DeviceTraits& traits() const noexcept override { return inner_->traits(); }
  bool asks_for_whole_groups() const noexcept override { return inner_->asks_for_whole_groups(); }
  Memory allocate(std::size_t bytes) override { return inner_->allocate(bytes); }
  bool release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept override {
    return inner_->release_after(memory, after);
  }
  EventPtr copy(CopyRequest request) override;
  void wait(Stream consumer, const EventPtr& copied) override { inner_->wait(consumer, copied); }
  EventPtr record(Stream consumer) override { return inner_->record(consumer); }
  std::int64_t now() const noexcept override { return inner_->now(); }
  bool device_time() const noexcept override { return inner_->device_time(); }
  EventPtr mark(Stream consumer) override { return inner_->mark(consumer); }
  void close() noexcept override { inner_->close(); }
  void synchronise(const EventPtr& event) noexcept override { inner_->synchronise(event); }
  std::uint64_t host_synchronisations() const noexcept override { return inner_->host_synchronisations(); }

 private:
  const std::shared_ptr<GatheredCopies> copies_;
  const std::unique_ptr<Backend> inner_;
};

}  // namespace dynswap::sim
