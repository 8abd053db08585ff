// Runs torch operations as bare kernels.
#pragma once

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace dynswap {

/// While it lives, torch operations on this thread record no gradients, bump no versions, and are seen
/// by no dispatch mode or functorch transform of the user's. Tensors made under it are ordinary ones,
/// also inside the user's inference_mode: the cache must never hold an inference tensor.
class PlainTorch {
  c10::InferenceMode ordinary_{false};
  c10::impl::ExcludeDispatchKeyGuard below_{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                            c10::python_ks | c10::functorch_transforms_ks};
};

}  // namespace dynswap
