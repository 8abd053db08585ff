// Runs torch operations as bare kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace dynswap {

/// While it lives, torch operations on this thread record no gradients, bump no versions, and are seen
/// by no dispatch mode or functorch transform of the user's. Tensors made under it are ordinary ones,
/// also inside the user's inference_mode: the cache must never hold an inference tensor.
class PlainTorch {
  c10::InferenceMode ordinary_{false};
  c10::impl::ExcludeDispatchKeyGuard below_{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::python_ks | c10::functorch_transforms_ks |
      // Inside a transform these catch what has no wrapped tensor among its arguments, too: at::empty().
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

/// Whether a tensor has sizes and strides of its own. Not so wrappers of functorch's or of functionalize()'s,
/// nested tensors (which throw if asked), and classes that dispatch to Python, which may run any code then.
inline bool has_layout(const c10::TensorImpl& tensor) noexcept {
  constexpr c10::DispatchKeySet others =
      c10::functorch_transforms_ks | c10::python_ks |
      c10::DispatchKeySet({c10::DispatchKey::NestedTensor, c10::DispatchKey::Functionalize});
  return !tensor.key_set().has_any(others) && tensor.layout() == at::kStrided;
}

/// Whether a tensor's bytes lie in its own storage. One that is known to be zero has none.
inline bool has_own_bytes(const at::Tensor& tensor) noexcept {
  return has_layout(*tensor.unsafeGetTensorImpl()) && tensor.has_storage() && !tensor._is_zerotensor();
}

/// Shares bytes and version counter with `tensor`, and is no part of its graph. As `detach()`, which would be
/// dispatched (and seen by the user's modes); tensors that torch wraps are detached by it all the same.
inline at::Tensor alias_of(const at::Tensor& tensor) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (impl->key_set().has_any(c10::python_ks | c10::functorch_transforms_ks)) return tensor.detach();
  return at::Tensor(
      impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

}  // namespace dynswap
