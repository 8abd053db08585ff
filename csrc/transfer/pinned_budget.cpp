#include "transfer/pinned_budget.h"

#include <bit>

namespace dynswap {

std::shared_ptr<void> PinnedBudget::charge(const std::shared_ptr<PinnedBudget>& budget, std::size_t bytes) {
  {
    const std::lock_guard lock(budget->mutex_);
    if (bytes > budget->locked_) return nullptr;
    budget->locked_ -= bytes;
  }
  return {budget.get(), [budget, bytes](void*) {
            const std::lock_guard back(budget->mutex_);
            budget->locked_ += bytes;
          }};
}

std::shared_ptr<PinnedCopy> PinnedBudget::copy_of(const std::shared_ptr<PinnedBudget>& budget,
                                                  const std::byte* address, std::size_t bytes,
                                                  const std::function<std::shared_ptr<PinnedCopy>()>& make) {
  const std::size_t taken = std::bit_ceil(bytes);
  {
    const std::lock_guard lock(budget->mutex_);
    std::erase_if(budget->copies_, [](const auto& entry) { return entry.second.expired(); });
    const auto found = budget->copies_.find({address, bytes});
    if (found != budget->copies_.end()) {
      if (auto known = found->second.lock()) return known;
    }
    if (taken > budget->copied_) return nullptr;
    budget->copied_ -= taken;
  }
  const std::shared_ptr<void> copied(budget.get(), [budget, taken](void*) {
    const std::lock_guard back(budget->mutex_);
    budget->copied_ += taken;
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
  const std::lock_guard lock(budget->mutex_);
  budget->copies_[{address, bytes}] = counted;
  return counted;
}

}  // namespace dynswap
