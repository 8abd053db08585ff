// Operators of the pretend device: the CPU's kernels, run on hidden bytes when their stream comes to them.
//
// Note [One kernel for all operators]
//   Shapes come from the operator's meta kernel, when it is called; outputs are allocated then. What is
//   queued is the operator itself over CPU tensors that alias the hidden bytes, so what a kernel writes in
//   place it writes in place. Operators without a meta kernel, whose shapes depend on data, or that return
//   other things than tensors wait for their stream and run at once, as on a GPU. Composite operators take
//   precedence over this fallback, and some end in kernels that only a build with CUDA has: those without
//   aliases are served here as a whole (register_composites).
#include "torch_fallback.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "torch_device.h"
#include "torch_meta.h"

namespace pretend {

at::Tensor host_view(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized(),
              "the pretend device has dense tensors alone");
  std::byte* at = nullptr;
  if (tensor.has_storage() && tensor.numel() > 0) {
    at = hidden(tensor.storage().data());
    TORCH_CHECK(at != nullptr, "a device tensor over memory of the host");
    at += tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
  }
  at::Tensor made = at::from_blob(
      at, tensor.sizes(), tensor.strides(), [](void*) {}, at::TensorOptions().dtype(tensor.dtype()));
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

namespace {

using torch::jit::Stack;

at::Tensor meta_of(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  at::Tensor made = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

/// The same value with every tensor in it mapped.
template <class Map>
c10::IValue mapped(const c10::IValue& value, const Map& map) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(map(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(each.defined() ? map(each) : each);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
      list.push_back(each && each->defined() ? std::optional(map(*each)) : std::nullopt);
    }
    return list;
  }
  return value;
}

template <class Use>
void each_tensor(const c10::IValue& value, const Use& use) {
  mapped(value, [&](const at::Tensor& tensor) {
    use(tensor);
    return tensor;
  });
}

/// Operators that take CPU tensors beside the device's (indices, values of one element aside).
bool takes_host_tensors(const std::string& name) {
  static const std::set<std::string> all{
      "aten::index",         "aten::index_put_",        "aten::_index_put_impl_", "aten::index_put",
      "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::tensor_split"};
  return all.contains(name);
}

/// The device that the operator runs on. Mixing devices is refused as torch refuses it.
int device_of_call(const c10::OperatorHandle& op, const c10::IValue* arguments, std::size_t count) {
  int device = -1;
  for (std::size_t i = 0; i < count; ++i) {
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) return;
      const int at = tensor.get_device();
      TORCH_CHECK(device < 0 || device == at || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  device_at(device), " and ", device_at(at), "! (", op.schema().name(), ")");
      if (device < 0 || tensor.dim() > 0) device = at;
    });
    if (device < 0 && arguments[i].isDevice() && arguments[i].toDevice().type() == kType) {
      device = arguments[i].toDevice().has_index() ? arguments[i].toDevice().index() : current_device();
    }
  }
  if (device < 0) device = current_device();
  if (takes_host_tensors(op.schema().name())) return device;
  for (std::size_t i = 0; i < count; ++i) {
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.is_cpu() || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  device_at(device), " and cpu! (", op.schema().name(), ")");
    });
  }
  return device;
}

struct Call {
  const c10::OperatorHandle* op;
  const c10::IValue* arguments;
  std::size_t count;
  int device;
  bool inference;  ///< the caller's mode, which is that of the results

  const c10::FunctionSchema& schema() const { return op->schema(); }

  /// The arguments as the CPU's kernel gets them. Host tensors are read now, as a launch does.
  Stack for_cpu() const {
    Stack stack;
    for (std::size_t i = 0; i < count; ++i) {
      const c10::IValue& value = arguments[i];
      const auto& type = schema().arguments()[i].type();
      const bool generator = type->str().find("Generator") != std::string::npos;
      if (generator) {
        stack.emplace_back(draw(value.toOptional<at::Generator>(), device));
      } else if (value.isDevice()) {
        stack.emplace_back(c10::Device(c10::kCPU));
      } else {
        stack.push_back(mapped(value, [](const at::Tensor& tensor) {
          if (on_device(tensor)) return host_view(tensor);
          at::Tensor copy = tensor.clone();
          if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
            copy.unsafeGetTensorImpl()->set_wrapped_number(true);
          return copy;
        }));
      }
    }
    return stack;
  }

  Stack for_meta() const {
    Stack stack;
    for (std::size_t i = 0; i < count; ++i) {
      const c10::IValue& value = arguments[i];
      if (value.isGenerator()) {
        stack.emplace_back();
      } else if (value.isDevice()) {
        stack.emplace_back(c10::Device(c10::kMeta));
      } else {
        // A host tensor stays one where the operator takes it.
        const bool host = takes_host_tensors(schema().name());
        stack.push_back(mapped(value, [host](const at::Tensor& tensor) {
          return host && tensor.is_cpu() ? tensor : meta_of(tensor);
        }));
      }
    }
    return stack;
  }

  bool runs_at_once() const {
    static const std::set<std::string> always{"aten::_embedding_bag", "aten::_embedding_bag_forward_only",
                                              "aten::_ctc_loss", "aten::unique_dim",
                                              "aten::multilabel_margin_loss_forward"};
    if (always.contains(schema().name())) return true;
    for (const c10::Argument& result : schema().returns()) {
      const std::string type = result.type()->str();
      if (type != "Tensor" && type != "Tensor[]" && type != "List[Tensor]") return true;
    }
    if (schema().name() == "aten::index") {
      bool masks = false;
      each_tensor(arguments[1], [&](const at::Tensor& index) {
        masks = masks || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      });
      return masks;
    }
    if (schema().name() == "aten::repeat_interleave" && count == 2) return arguments[1].isNone();
    return op->hasTag(at::Tag::dynamic_output_shape) || op->hasTag(at::Tag::data_dependent_output);
  }

  /// Index of the argument that the result is, for what is written in place or to out=; else -1.
  int argument_returned(std::size_t result) const {
    const auto* const alias = schema().returns()[result].alias_info();
    if (alias == nullptr || !alias->isWrite()) return -1;
    for (std::size_t i = 0; i < count; ++i) {
      const auto* const other = schema().arguments()[i].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) return static_cast<int>(i);
    }
    return -1;
  }
};

at::Tensor empty_as(const at::Tensor& example, const Call& call) {
  const c10::InferenceMode mode(call.inference);
  const c10::Device where = device_at(call.device);
  at::Tensor made = at::empty_strided(example.sizes(), example.strides(), example.options().device(where));
  if (example.is_conj()) made._set_conj(true);
  if (example.is_neg()) made._set_neg(true);
  return made;
}

void keep_result(const at::Tensor& target, const at::Tensor& result, const c10::FunctionSchema& schema) {
  // Auxiliary outputs may be left out by the CPU's kernel.
  if (!target.defined() || !result.defined() || (result.numel() == 0 && schema.returns().size() > 1)) return;
  TORCH_CHECK(target.sizes() == result.sizes(), schema.name(), " gave ", result.sizes(),
              " and its meta kernel ", target.sizes());
  target.copy_(result);
}

/// Runs the operator over the CPU's tensors and puts what it returns where it belongs.
void run(const c10::OperatorHandle& op, Stack stack, const std::vector<at::Tensor>& targets) {
  const BareKernels guard;
  try {
    op.callBoxed(stack);
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
  std::vector<at::Tensor> results;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      results.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) results.push_back(each);
    }
  }
  for (std::size_t i = 0; i < targets.size() && i < results.size(); ++i)
    keep_result(targets[i], results[i], op.schema());
}

/// Gives a tensor that is to be written its new size, as kernels do with out=.
void take_size(const at::Tensor& tensor, const at::Tensor& wanted) {
  if (tensor.sizes() == wanted.sizes()) return;
  tensor.resize_(wanted.sizes());
}

std::mutex& known_mutex() {
  static std::mutex mutex;
  return mutex;
}
std::set<std::string>& without_meta() {
  static auto* const all = new std::set<std::string>;
  return *all;
}

void replace_arguments(Stack& stack, std::size_t count, std::vector<c10::IValue> results) {
  torch::jit::drop(stack, count);
  for (c10::IValue& result : results) stack.push_back(std::move(result));
}

void run_at_once(const Call& call, Stack& stack) {
  Stream& stream = current_stream(call.device);
  note_synchronisation();
  Stack arguments = call.for_cpu();
  const c10::OperatorHandle& op = *call.op;
  Stack done = arguments;
  checked([&] { synchronise(stream, op.schema().name().c_str()); });
  {
    const BareKernels guard;
    op.callBoxed(done);
  }
  std::vector<c10::IValue> results;
  for (std::size_t i = 0; i < done.size(); ++i) {
    const int returned = call.argument_returned(i);
    if (returned >= 0) {
      each_tensor(call.arguments[returned], [&](const at::Tensor& tensor) {
        if (done[i].isTensor() &&
            done[i].toTensor().data_ptr() != arguments[returned].toTensor().data_ptr()) {
          take_size(tensor, done[i].toTensor());
          host_view(tensor).copy_(done[i].toTensor());
        } else if (done[i].isTensor() && done[i].toTensor().sizes() != tensor.sizes()) {
          take_size(tensor, done[i].toTensor());
          host_view(tensor).copy_(done[i].toTensor());
        }
      });
      results.push_back(call.arguments[returned]);
    } else {
      results.push_back(mapped(done[i], [&](const at::Tensor& result) {
        const at::Tensor made = empty_as(result, call);
        checked([&] { synchronise(stream, "a result"); });  // freshly freed memory is still being poisoned
        host_view(made).copy_(result);
        return made;
      }));
    }
  }
  replace_arguments(stack, call.count, std::move(results));
}

void serve(const c10::OperatorHandle& op, Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  const c10::IValue* const arguments = stack->data() + (stack->size() - count);
  Call call{&op, arguments, count, device_of_call(op, arguments, count), c10::InferenceMode::is_enabled()};
  const c10::DeviceGuard device(device_at(call.device));
  const BareKernels guard;
  const std::string name = op.schema().name();
  bool at_once = call.runs_at_once();
  if (!at_once) {
    const std::lock_guard lock(known_mutex());
    at_once = without_meta().contains(name);
  }
  if (at_once) return run_at_once(call, *stack);

  const std::string look = look_of_call(op.schema(), arguments, takes_host_tensors(name));
  std::optional<Stack> known = known_meta(look);
  if (!known) {
    const Stack meta_arguments = call.for_meta();
    known = meta_arguments;
    try {
      op.callBoxed(*known);
    } catch (const c10::NotImplementedError&) {
      {
        const std::lock_guard lock(known_mutex());
        without_meta().insert(name);
      }
      return run_at_once(call, *stack);
    }
    bool resized = false;
    for (std::size_t i = 0; i < count; ++i) {  // out= and in place, resized by their kernels
      if (arguments[i].isTensor() && on_device(arguments[i].toTensor()) &&
          op.schema().arguments()[i].alias_info() && op.schema().arguments()[i].alias_info()->isWrite()) {
        resized = resized || arguments[i].toTensor().sizes() != meta_arguments[i].toTensor().sizes();
        take_size(arguments[i].toTensor(), meta_arguments[i].toTensor());
      }
    }
    if (!resized) keep_meta(look, *known);
  }
  const Stack& meta = *known;
  std::vector<c10::IValue> results;
  std::vector<at::Tensor> targets;
  for (std::size_t i = 0; i < meta.size(); ++i) {
    const int returned = call.argument_returned(i);
    if (returned >= 0) {
      results.push_back(arguments[returned]);
      each_tensor(arguments[returned], [&](const at::Tensor&) { targets.emplace_back(); });
      continue;
    }
    if (meta[i].isTensor() && !meta[i].toTensor().defined()) targets.emplace_back();
    results.push_back(mapped(meta[i], [&](const at::Tensor& result) {
      const at::Tensor made = empty_as(result, call);
      targets.push_back(host_view(made));
      return made;
    }));
  }
  checked([&] {
    enqueue(
        current_stream(call.device),
        [handle = op, cpu = call.for_cpu(), targets] { run(handle, cpu, targets); },
        op.schema().name().c_str());
  });
  replace_arguments(*stack, count, std::move(results));
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { serve(op, stack); }

TORCH_LIBRARY_IMPL(_, PRETEND_TYPE, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

/// Composite operators that are served as a whole (Note [One kernel for all operators]).
bool served_as_a_whole(const c10::OperatorHandle& op) {
  static const std::set<std::string> not_these{"aten::clone",
                                               "aten::_to_copy",
                                               "aten::copy",
                                               "aten::lift",
                                               "aten::empty_like",
                                               "aten::_pin_memory",
                                               "aten::rand_like",
                                               "aten::randn_like",
                                               "aten::randint_like",
                                               "aten::zeros_like",
                                               "aten::ones_like",
                                               "aten::full_like",
                                               "aten::new_empty",
                                               "aten::new_empty_strided",
                                               "aten::new_full",
                                               "aten::new_zeros",
                                               "aten::new_ones",
                                               "aten::is_pinned",
                                               "aten::_fw_primal_copy",
                                               "aten::_resize_output",
                                               "aten::bernoulli",
                                               "aten::_pack_padded_sequence",  // sizes on the CPU
                                               "aten::rrelu",
                                               "aten::native_dropout"};
  const c10::FunctionSchema& schema = op.schema();
  // A structured operator's stands for its out= variant, whose output some of the CPU's kernels resize twice.
  const bool structured =
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
  if (!structured && !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) return false;
  if (op.hasKernelForDispatchKey(kKey) || not_these.contains(schema.name())) return false;
  bool tensors = false;
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.alias_info() != nullptr && !(structured && argument.alias_info()->isWrite())) return false;
    const std::string type = argument.type()->str();
    if (type.find("Storage") != std::string::npos || type.find("Stream") != std::string::npos) return false;
    tensors = tensors || type.find("Tensor") != std::string::npos;
  }
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() != nullptr && !(structured && result.alias_info()->isWrite())) return false;
    if (result.type()->str().find("Tensor") == std::string::npos) return false;
  }
  return tensors && !schema.returns().empty();
}

}  // namespace

/// Called once torch's own operators are there.
void register_composites() {
  static auto* const library = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !served_as_a_whole(*op)) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace pretend
