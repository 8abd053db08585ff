// Operators of the pretend device that have kernels of their own: memory, views, copies, and what only CUDA
// builds of torch have.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>

#include "torch_device.h"
#include "torch_fallback.h"

namespace pretend {

namespace {

// -------------------------------------------------------------------------------------------- memory

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(kKey),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device,
                         std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(kKey),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const std::size_t needed =
      (static_cast<std::size_t>(impl->numel()) + static_cast<std::size_t>(impl->storage_offset())) *
      impl->itemsize();
  if (impl->numel() > 0 && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<std::int64_t>(source.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {size}, {});
}

void record_stream(at::Tensor& self, at::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

at::Scalar item(const at::Tensor& self) {
  note_synchronisation();
  checked([&] { synchronise(current_stream(self.get_device()), "Tensor.item"); });
  const BareKernels guard;
  return host_view(self).item();
}

// --------------------------------------------------------------------------------------------- copies

/// Both are dense in the same order and of one type: their bytes can be moved as they lie.
bool moves_as_bytes(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
         to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
         to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

void queue_copy(const at::Tensor& to, const at::Tensor& from, Stream& stream) {
  checked([&] {
    enqueue(
        stream,
        [target = host_view(to), source = host_view(from)] {
          const BareKernels guard;
          target.copy_(source);
        },
        "a copy on the device");
  });
}

void copy_bytes(const at::Tensor& to, const at::Tensor& from, Stream& stream, bool non_blocking) {
  const bool host_from = from.is_cpu(), host_to = to.is_cpu();
  const void* const host = host_from ? from.const_data_ptr() : to.const_data_ptr();
  // Pageable memory: the call returns when it has been read, or has come.
  const bool waits =
      !non_blocking || faults().synchronous_copies || (host_to && pinned(host, to.nbytes()) != Pinned::whole);
  if (waits) {
    note_synchronisation();
    checked([] { refuse_if_forbidden("a blocking copy"); });
  }
  checked([&] { copy(stream, to.data_ptr(), from.const_data_ptr(), to.nbytes()); });
  if (host_from || host_to)
    note_pinned_use(host, (host_from ? from : to).storage().data_ptr().get_context(), stream);
  if (waits) checked([&] { synchronise(stream, "a blocking copy"); });
}

at::Tensor& copy_into(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (on_device(self) && source.is_cpu() && moves_as_bytes(self, source)) {
    const c10::DeviceGuard device(self.device());
    copy_bytes(self, source, current_stream(self.get_device()), non_blocking);
    return self;
  }
  const BareKernels guard;
  at::Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  if (on_device(self) && on_device(from)) {
    if (self.get_device() == from.get_device()) {
      queue_copy(self, from, current_stream(self.get_device()));
      return self;
    }
    // As torch: on the source's stream, in order with the target's before and after.
    Stream& there = current_stream(from.get_device());
    Stream& here = current_stream(self.get_device());
    checked([&] { wait(there, record(here)); });
    queue_copy(self, from, there);
    checked([&] { wait(here, record(there)); });
    return self;
  }
  const c10::DeviceGuard device(on_device(self) ? self.device() : from.device());
  Stream& stream = current_stream(on_device(self) ? self.get_device() : from.get_device());
  if (moves_as_bytes(self, from)) {
    copy_bytes(self, from, stream, non_blocking);
    return self;
  }
  if (on_device(self)) {  // shaped and cast on the host, then moved, then laid out
    const at::Tensor there = at::empty(self.sizes(), self.options());
    at::Tensor here = at::empty(self.sizes(), self.options().device(at::kCPU));
    here.copy_(from);
    copy_bytes(there, here, stream, false);
    queue_copy(self, there, stream);
  } else {  // laid out on the device, moved, then cast on the host
    const at::Tensor there = at::empty(from.sizes(), from.options());
    queue_copy(there, from, stream);
    at::Tensor here = at::empty(from.sizes(), from.options().device(at::kCPU));
    copy_bytes(here, there, stream, false);
    self.copy_(here);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  const_cast<at::Tensor&>(target).copy_(self);
  return target;
}

// ------------------------------------------------------------------- kernels that only CUDA builds have

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  const at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  const double scale = p >= 1 ? 0.0 : 1 / (1 - p);
  return {input.mul(mask).mul(scale), mask};
}

bool no_cudnn(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef, std::int64_t) {
  return false;
}
bool no_cudnn_for_tensors(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          std::int64_t) {
  return false;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input,
                                                         const at::Tensor& hidden_gates, const at::Tensor& cx,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor gates = input + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  const auto parts = gates.chunk(4, 1);
  const at::Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(),
                   o = parts[3].sigmoid();
  const at::Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& grad_hy,
                                                                  const std::optional<at::Tensor>& grad_cy,
                                                                  const at::Tensor& cx, const at::Tensor& cy,
                                                                  const at::Tensor& workspace,
                                                                  bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const at::Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const at::Tensor squashed = cy.tanh();
  at::Tensor grad_cell = grad_cy && grad_cy->defined() ? *grad_cy : at::zeros_like(cy);
  at::Tensor grad_o = at::zeros_like(cy);
  if (grad_hy && grad_hy->defined()) {
    grad_cell = grad_cell + *grad_hy * o * (1 - squashed * squashed);
    grad_o = *grad_hy * squashed;
  }
  const at::Tensor grads = at::cat({grad_cell * g * i * (1 - i), grad_cell * cx * f * (1 - f),
                                    grad_cell * i * (1 - g * g), grad_o * o * (1 - o)},
                                   1);
  return {grads, grad_cell * f, has_bias ? grads.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input, const at::Tensor& hidden_gates,
                                            const at::Tensor& hx, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  const bool biased = input_bias && input_bias->defined();
  const auto in = (biased ? input + *input_bias : input).chunk(3, 1);
  const auto rec = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const at::Tensor r = (in[0] + rec[0]).sigmoid(), z = (in[1] + rec[1]).sigmoid(),
                   n = (in[2] + r * rec[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, rec[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad, const at::Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const at::Tensor &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hn = parts[4];
  const at::Tensor grad_n = grad * (1 - z) * (1 - n * n), grad_z = grad * (hx - n) * z * (1 - z);
  const at::Tensor grad_r = grad_n * hn * r * (1 - r);
  const at::Tensor inputs = at::cat({grad_r, grad_z, grad_n}, 1),
                   rec = at::cat({grad_r, grad_z, grad_n * r}, 1);
  return {inputs, rec, grad * z, has_bias ? inputs.sum(0) : at::Tensor(),
          has_bias ? rec.sum(0) : at::Tensor()};
}

// ---------------------------------------------------------------------------------------- registration

TORCH_LIBRARY_IMPL(aten, PRETEND_TYPE, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("record_stream", &record_stream);
  m.impl("_local_scalar_dense", &item);
  m.impl("copy_", &copy_into);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("native_dropout", &native_dropout);
  m.impl("_use_cudnn_ctc_loss", &no_cudnn);
  m.impl("_use_cudnn_ctc_loss.Tensor", &no_cudnn_for_tensors);
  m.impl("_use_miopen_ctc_loss", &no_cudnn);
  m.impl("_use_miopen_ctc_loss.Tensor", &no_cudnn_for_tensors);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

}  // namespace

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = allocator().allocate(bytes);
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    checked([&] { copy(current_stream(storage.device().index()), fresh.get(), storage.data(), kept); });
  }
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

}  // namespace pretend
