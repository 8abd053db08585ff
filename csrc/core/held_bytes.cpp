#include "core/held_bytes.h"

#include <mutex>
#include <utility>

#include "core/protection.h"

namespace dynswap {

std::shared_ptr<HeldBytes> HeldBytes::of(const Context& context) noexcept {
  if (!context || context.get_deleter() != &drop_share) return nullptr;
  return static_cast<HeldBytes*>(context.get())->share_;
}

std::shared_ptr<HeldBytes> HeldBytes::hold(Context& context) {
  std::shared_ptr<HeldBytes> held = of(context);
  if (!held) {
    held = std::make_shared<HeldBytes>();
    held->share_ = held;
    held->original_ = std::exchange(context, Context(held.get(), &drop_share));
  }
  ++held->holders_;
  return held;
}

void HeldBytes::leave(Context* context) noexcept {
  if (--holders_ > 0 || context == nullptr || of(*context).get() != this) return;
  // The caller has a share, so this object does not die with the storage's.
  const Context share = std::exchange(*context, std::move(original_));
}

void HeldBytes::drop_share(void* bytes) noexcept {
  const std::shared_ptr<HeldBytes> own = std::move(static_cast<HeldBytes*>(bytes)->share_);
  if (!PROTECTED(bytes_outlive_storage)) own->original_.reset();
}

bool HeldBytes::lock(const Locker& locker) {
  const std::lock_guard guard(changing_);
  if (!locked_) locked_ = locker();
  if (!locked_) return false;
  ++locks_;
  return true;
}

bool HeldBytes::lock_again() {
  return lock([] { return std::shared_ptr<void>(); });
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
