#include "tensor/sharing.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "accelerator/plain_torch.h"
#include "io/fork_gate.h"
#include "platform/fork_safe.h"
#include "tensor/master.h"

namespace dynswap {

namespace {

/// Every Sharing that there is, by the magnitude of its length. What may reach an address from below is then
/// looked for over no more than its own length, however long others are.
struct Registry {
  using ByAddress = std::multimap<const std::byte*, Sharing*>;
  static constexpr int kMagnitudes = std::numeric_limits<std::uintptr_t>::digits + 1;

  Mutex mutex;
  // LOCK: mutex guards all below.
  std::array<ByAddress, kMagnitudes> by_magnitude;

  /// Never freed: weights may outlive static objects.
  static Registry& get() {
    static auto* const registry = new Registry;
    return *registry;
  }

  ByAddress& like(const Elements& elements) { return by_magnitude[std::bit_width(elements.bytes)]; }

  /// Calls `use` for each Sharing of which a byte may lie in [begin, end).
  template <class Use>
  void for_near(const std::byte* begin, const std::byte* end, const Use& use) const {
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    for (int magnitude = 0; magnitude < kMagnitudes; ++magnitude) {
      const ByAddress& alike = by_magnitude[magnitude];
      if (alike.empty()) continue;
      const auto longest = magnitude == 0 ? 0 : ~std::uintptr_t{0} >> (kMagnitudes - 1 - magnitude);
      const auto* const from = begin - std::min(longest, address);
      for (auto entry = alike.lower_bound(from); entry != alike.end() && entry->first < end; ++entry)
        use(*entry->second);
    }
  }
};

/// Holds the registry's lock, and no fork happens meanwhile.
struct Locked {
  Registry& registry = Registry::get();
  NoFork no_fork;
  std::lock_guard<Mutex> lock{registry.mutex};
};

bool is_page_locked(const at::Tensor& master) {
  if (!at::getAccelerator().has_value()) return false;
  const PlainTorch guard;
  return master.is_pinned();
}

}  // namespace

Sharing::Place Sharing::Place::of(const at::Tensor& master) {
  const auto* const begin = static_cast<const std::byte*>(memory_of(*master.unsafeGetTensorImpl()).second);
  return {elements_of(master), begin, begin + master.storage().nbytes(), is_page_locked(master)};
}

std::shared_ptr<Sharing> Sharing::of(const at::Tensor& master, Place place,
                                     const std::shared_ptr<MasterRecord>& record) {
  auto made = std::make_shared<Sharing>(Private(), master, std::move(place), record);
  const Elements& elements = made->place_.elements;
  const Locked locked;
  locked.registry.for_near(elements.address, elements.end(), [&](Sharing& other) {
    if (!made->has_bytes_of(other)) return;
    made->overlaps_ = true;
    other.overlaps_ = true;
  });
  locked.registry.like(elements).emplace(elements.address, made.get());
  return made;
}

Sharing::Sharing(Private, const at::Tensor& master, Place place, const std::shared_ptr<MasterRecord>& record)
    : place_(std::move(place)),
      master_(master.unsafeGetTensorImpl()),
      storage_(master.storage().getWeakStorageImpl()),
      record_(record),
      version_(master.unsafeGetTensorImpl()->version_counter()) {}

Sharing::~Sharing() {
  const Locked locked;
  Registry::ByAddress& alike = locked.registry.like(place_.elements);
  const auto [first, last] = alike.equal_range(place_.elements.address);
  const auto entry = std::find_if(first, last, [&](const auto& other) { return other.second == this; });
  if (entry != last) alike.erase(entry);
}

/// Whether some byte may be of both masters. The same master in another plan or session does not count; nor
/// does one whose memory has been freed.
bool Sharing::has_bytes_of(const Sharing& other) const noexcept {
  return &other != this && other.master_ != master_ && !other.storage_.expired() &&
         may_overlap(place_.elements, other.place_.elements);
}

Sharing::Seen Sharing::now() const {
  const Locked locked;
  return {version_.enabled() ? version_.current_version() : 0, ours_};
}

bool Sharing::only_ours_since(Seen seen) const {
  const Seen now = this->now();
  return now.version - seen.version == now.ours - seen.ours;
}

std::optional<Sharing::Seen> Sharing::if_of_others(Seen seen, MemoryWatch* watch,
                                                   std::uint64_t writes) const {
  const Seen now = this->now();
  if (now.version - seen.version == now.ours - seen.ours) return now;
  const bool part = place_.elements.address != place_.begin || place_.elements.end() != place_.end ||
                    place_.elements.has_gaps();
  if (!part || place_.page_locked || watch == nullptr || !watch->decides() || watch->writes() != writes)
    return std::nullopt;
  return now;
}

void Sharing::bump() {
  if (!version_.enabled()) return;  // an inference tensor has none
  const Locked locked;
  const auto before = version_.current_version();
  std::vector<Sharing*> on_the_counter;
  locked.registry.for_near(place_.begin, place_.end, [&](Sharing& other) {
    if (&other != this && other.version_.enabled() && other.version_.current_version() == before)
      on_the_counter.push_back(&other);
  });
  c10::VariableVersion(version_).bump();
  for (Sharing* const other : on_the_counter) {
    if (other->version_.current_version() != before && other->master_ != master_ &&
        !may_overlap(place_.elements, other->place_.elements))
      ++other->ours_;
  }
}

std::vector<std::shared_ptr<MasterRecord>> Sharing::overlapping() const {
  std::vector<std::shared_ptr<MasterRecord>> records;
  const Locked locked;
  locked.registry.for_near(place_.elements.address, place_.elements.end(), [&](Sharing& other) {
    if (!has_bytes_of(other)) return;
    if (auto record = other.record_.lock()) records.push_back(std::move(record));
  });
  return records;
}

}  // namespace dynswap
