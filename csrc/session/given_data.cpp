// `.data = t` on a tensor that a forward was handed out.
#include <torch/csrc/autograd/python_variable.h>

#include "accelerator/plain_torch.h"
#include "session/python_content.h"
#include "session/session.h"
#include "tensor/handed_out.h"
#include "tensor/written_buffers.h"

namespace dynswap {

namespace {

/// What modules of the session have as the weight's master now; None if none has it.
py::object master_of(const std::shared_ptr<Session>& session, const Weight& weight) {
  for (const py::handle master : session->hooks().masters(py::cast(session))) {
    if (THPVariable_Unpack(master.ptr()).unsafeGetTensorImpl() == weight.state.impl)
      return py::reinterpret_borrow<py::object>(master);
  }
  return py::none();
}

/// If `data` is a copy of some master as a whole: that master's own bytes, with what was written on the copy.
py::object as_handed_out(const at::Tensor& data, const at::Tensor& master) {
  HandedOut* const copy = has_own_bytes(data) ? HandedOut::of(*data.unsafeGetTensorImpl()) : nullptr;
  if (copy == nullptr) return py::none();
  const at::Tensor& of = copy->master();
  const bool whole = data.scalar_type() == copy->dtype() && data.storage_offset() == 0 &&
                     data.sizes() == of.sizes() && data.strides() == strides_of_copy(of);
  if (!whole || of.scalar_type() != master.scalar_type() || of.device() != master.device()) return py::none();
  write_back_living(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(data.storage().unsafeGetStorageImpl()));
  if (copy->postponed() || !copy->master_unchanged()) return py::none();
  const std::shared_ptr<MasterContent> content = copy->content();
  if (!content) return py::cast(alias_of(of));
  // Of a LosslessTensor, the data can be another one of the same content, coded or not.
  if (!master.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python))
    return py::cast(content->memory());
  return py::cast(static_cast<PythonContent&>(*content).view(of.sizes(), of.strides(), 0));
}

}  // namespace

/// Note [Data given inside a forward]
/// A tensor that a forward was handed out stands for the parameter, so `.data = t` on it is one on the
/// parameter: the master gets t's data, on its own device, and the next access copies it. As torch does, the
/// tensor itself has other bytes then, and what shows the old ones keeps them: `old = w.data; w.data = new;
/// ...; w.data = old`. What was handed out of a master goes back as that master's own bytes, as a cast would
/// round them. A graph that has used the weight before would, of a plain parameter, compute its gradient with
/// the old data or with the new, depending on what the operation has saved. Here such a graph takes it for a
/// write, and its backward raises torch's error. (The master's own version stays, as in torch.)
bool Session::give_data(HandedOut& record, const at::Tensor& tensor, const at::Tensor& data,
                        const std::function<void()>& assign) {
  const py::gil_scoped_acquire gil;
  const std::shared_ptr<Weight> weight = weight_of(record);
  const py::object found = master_of(shared_from_this(), *weight);
  if (found.is_none()) return false;
  const at::Tensor& master = THPVariable_Unpack(found.ptr());
  const py::object as_master = as_handed_out(data, master);
  const py::object dtype = py::cast(tensor.scalar_type());
  const py::object device = py::cast(tensor.device());
  record.note_other_data();
  tensor.unsafeGetTensorImpl()->bump_version();
  ++*weight->times_given();
  assign();
  hooks_.give_data(py::cast(tensor), found, py::cast(data), as_master, dtype, device);
  return true;
}

}  // namespace dynswap
