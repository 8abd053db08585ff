#include "transfer/pinned_copies.h"

#include <bit>
#include <mutex>

#include "core/host_memory.h"

namespace dynswap {

std::shared_ptr<PinnedCopy> PinnedCopies::copy_of(const std::byte* address, std::size_t bytes,
                                                  const std::function<std::shared_ptr<PinnedCopy>()>& make) {
  Copies& copies = *copies_;
  {
    const std::lock_guard lock(copies.mutex);
    std::erase_if(copies.known, [](const auto& entry) { return entry.second.expired(); });
    const auto found = copies.known.find({address, bytes});
    if (found != copies.known.end()) {
      if (auto known = found->second.lock()) return known;
    }
  }
  const auto charge = HostMemory::charge(HostUse::copies, std::bit_ceil(bytes));
  if (!charge) return nullptr;
  struct Counted {
    std::shared_ptr<const HostMemory::Charge> charge;
    std::shared_ptr<PinnedCopy> copy;  // last: freed while it is still counted
  };
  const auto made = std::make_shared<const Counted>(Counted{charge, make()});
  if (!made->copy) return nullptr;
  const std::shared_ptr<PinnedCopy> counted(made, made->copy.get());
  const std::lock_guard lock(copies.mutex);
  copies.known[{address, bytes}] = counted;
  return counted;
}

}  // namespace dynswap
