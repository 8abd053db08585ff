// What handed-out tensors ask of whoever hands them out.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace dynswap {

class HandedOut;
struct MasterRecord;

/// Hands tensors out, and hears from them. A tensor outlives it, or knows another by then.
class Server {
 public:
  virtual ~Server() = default;

  /// What was written on what was handed out of the master is dropped, as the master was written meanwhile.
  /// Any thread may call it.
  virtual void note_lost(const std::shared_ptr<MasterRecord>& of) = 0;

  /// Takes what was written on the latest tensor of a master to that master. `handed_out` is the tensor's
  /// storage. With the GIL.
  virtual void write_back_latest(const c10::intrusive_ptr<c10::StorageImpl>& handed_out) = 0;

  /// Gives other data to `tensor`, which shows what was handed out with this record, and to the master.
  /// `assign` gives them to the tensor alone, with which the record may die. Changes nothing, and returns
  /// false, if no module has the master any more.
  virtual bool give_data(HandedOut& record, const at::Tensor& tensor, const at::Tensor& data,
                         const std::function<void()>& assign) = 0;
};

}  // namespace dynswap
