#include "core/held_bytes.h"

#include <mutex>
#include <utility>

#include "core/protection.h"

namespace dynswap {

std::shared_ptr<HeldBytes> HeldBytes::of(const Context& context) noexcept {
  if (!context || context.get_deleter() != &drop_share) return nullptr;
  return *static_cast<std::shared_ptr<HeldBytes>*>(context.get());
}

std::shared_ptr<HeldBytes> HeldBytes::hold(Context& context) {
  std::shared_ptr<HeldBytes> held = of(context);
  if (!held) {
    held = std::make_shared<HeldBytes>();
    Context exchanged(new std::shared_ptr<HeldBytes>(held), &drop_share);
    held->original_ = std::exchange(context, std::move(exchanged));
  }
  ++held->holders_;
  return held;
}

void HeldBytes::leave(Context* context) noexcept {
  if (--holders_ > 0 || context == nullptr || of(*context).get() != this) return;
  // The caller has a share, so this object does not die with the storage's.
  const Context share = std::exchange(*context, std::move(original_));
}

void HeldBytes::drop_share(void* share) noexcept {
  const std::unique_ptr<std::shared_ptr<HeldBytes>> own(static_cast<std::shared_ptr<HeldBytes>*>(share));
  if (!PROTECTED(bytes_outlive_storage)) (*own)->original_.reset();
}

bool HeldBytes::lock(const Locker& locker) {
  const std::lock_guard guard(changing_);
  if (!locked_) locked_ = locker();
  if (!locked_) return false;
  ++locks_;
  return true;
}

bool HeldBytes::locked() {
  const std::lock_guard guard(changing_);
  return locked_ != nullptr;
}

void HeldBytes::unlock() noexcept {
  const std::lock_guard guard(changing_);
  if (--locks_ == 0) locked_.reset();
}

}  // namespace dynswap
