#include "transfer/pinned_budget.h"

#include <bit>
#include <mutex>

namespace dynswap {

std::shared_ptr<void> PinnedBudget::charge(const std::shared_ptr<PinnedBudget>& budget, std::size_t bytes) {
  {
    Counts& counts = *budget->counts_;
    const std::lock_guard lock(counts.mutex);
    if (bytes > counts.locked) return nullptr;
    counts.locked -= bytes;
  }
  return {budget.get(), [budget, bytes](void*) {
            Counts& counts = *budget->counts_;
            const std::lock_guard back(counts.mutex);
            counts.locked += bytes;
          }};
}

std::shared_ptr<PinnedCopy> PinnedBudget::copy_of(const std::shared_ptr<PinnedBudget>& budget,
                                                  const std::byte* address, std::size_t bytes,
                                                  const std::function<std::shared_ptr<PinnedCopy>()>& make) {
  const std::size_t taken = std::bit_ceil(bytes);
  Counts& counts = *budget->counts_;
  {
    const std::lock_guard lock(counts.mutex);
    std::erase_if(counts.copies, [](const auto& entry) { return entry.second.expired(); });
    const auto found = counts.copies.find({address, bytes});
    if (found != counts.copies.end()) {
      if (auto known = found->second.lock()) return known;
    }
    if (taken > counts.copied) return nullptr;
    counts.copied -= taken;
  }
  const std::shared_ptr<void> copied(budget.get(), [budget, taken](void*) {
    Counts& counts = *budget->counts_;
    const std::lock_guard back(counts.mutex);
    counts.copied += taken;
  });
  const std::shared_ptr<void> locked = charge(budget, taken);
  if (!locked) return nullptr;
  struct Counted {
    std::shared_ptr<void> copied, locked;
    std::shared_ptr<PinnedCopy> copy;  // last: freed while it is still counted
  };
  const auto made = std::make_shared<const Counted>(Counted{copied, locked, make()});
  if (!made->copy) return nullptr;
  const std::shared_ptr<PinnedCopy> counted(made, made->copy.get());
  const std::lock_guard lock(counts.mutex);
  counts.copies[{address, bytes}] = counted;
  return counted;
}

}  // namespace dynswap
