#include "platform/fork_safe.h"

#include "platform/process.h"

namespace dynswap::fork_detail {

namespace {

/// A byte and no mutex: a child has to be able to take it whatever it finds.
std::atomic<bool> renewing{false};

/// Registered when the library is loaded, and so before all other handlers of this library, as those in the
/// child run in the order of their registration: objects are the parent's from the first of them on.
[[maybe_unused]] const bool counts_forks = at_fork([] { ++child_count; }, nullptr,
                                                   [] {
                                                     ++fork_count;
                                                     renewing = false;
                                                   });

}  // namespace

// Held for as long as it takes to make a small object, and only in forked children.
Renewal::Renewal() noexcept {
  while (renewing.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
}

Renewal::~Renewal() { renewing.store(false, std::memory_order_release); }

}  // namespace dynswap::fork_detail
