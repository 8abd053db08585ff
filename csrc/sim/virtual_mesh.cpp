#include "sim/virtual_mesh.h"

#include <string>
#include <utility>

#include "core/check.h"
#include "mesh/ranks.h"

namespace dynswap::sim {

namespace {

/// The ranks are alike: none waits for another, however slow the machine is.
constexpr GatheredCopies::Milliseconds kEndless = std::chrono::hours(24);

enum : Stream { kGathers = kConsumer + 1, kNobody };

/// The others do what this rank does, when it does.
class Alike final : public Ranks {
 public:
  Alike(VirtualBackend& clock, const Mesh& mesh, double latency)
      : clock_(clock), mesh_(mesh), latency_(latency) {
    DYNSWAP_CHECK(mesh.ranks >= 2 && mesh.bytes_per_second > 0,
                  "a mesh has two ranks at least, and the link between them a speed");
  }

  std::size_t rank() const noexcept override { return 0; }
  std::size_t size() const noexcept override { return mesh_.ranks; }
  Stream stream() const noexcept override { return kGathers; }
  void all_gather(std::byte*, std::size_t part) override {
    const auto received = static_cast<double>((mesh_.ranks - 1) * part);
    clock_.kernel(latency_ + received / mesh_.bytes_per_second, kGathers);
  }
  std::unique_ptr<Told> tell(const Words& words) override {
    class Same final : public Told {
     public:
      explicit Same(std::vector<Words> words) : words_(std::move(words)) {}
      std::vector<Words> wait() override { return words_; }

     private:
      const std::vector<Words> words_;
    };
    return std::make_unique<Same>(std::vector<Words>(mesh_.ranks, words));
  }
  void note_pass(std::uint64_t) override {}
  bool begun(std::uint64_t) override { return false; }
  void note(const std::string&, bool) noexcept override {}
  std::string states() noexcept override { return {}; }

 private:
  VirtualBackend& clock_;
  const Mesh mesh_;
  const double latency_;
};

/// All masters are shared.
std::uint64_t identity(const Source& source) { return reinterpret_cast<std::uintptr_t>(&source); }

}  // namespace

VirtualMesh::VirtualMesh(std::unique_ptr<VirtualBackend> clock, const Mesh& mesh, double latency)
    : copies_(std::make_shared<GatheredCopies>(std::make_unique<Alike>(*clock, mesh, latency), identity,
                                               /*always=*/false, kEndless)),
      inner_(copies_->around(std::move(clock))) {}

EventPtr VirtualMesh::copy(CopyRequest request) {
  EventPtr copied = inner_->copy(std::move(request));
  inner_->wait(kNobody, copied);  // which returns when it is issued
  return copied;
}

}  // namespace dynswap::sim
