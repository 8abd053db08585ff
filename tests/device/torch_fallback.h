// What serves every operator that has no kernel of its own (torch_fallback.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace pretend {

/// Nothing of the user's modes and graphs sees what is done under it.
struct BareKernels {
  c10::InferenceMode ordinary{false};  // first: it lets autograd in again
  at::DisableRecordFunctionGuard unrecorded;
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | c10::python_ks |
      c10::functorch_transforms_ks |
      c10::DispatchKeySet({c10::DispatchKey::PythonDispatcher, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

/// The CPU's view of a device tensor. Holds nothing.
at::Tensor host_view(const at::Tensor& tensor);

}  // namespace pretend
