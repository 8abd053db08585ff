// The hooks of the device of type PrivateUse1.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "torch_hooks.h"

namespace pretend {

namespace {

struct PrivateUse1Hooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new PrivateUse1Hooks);
  return true;
}();

}  // namespace

}  // namespace pretend
