// Small buffers that a training module's forward is handed, and that it may write without a trace.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace dynswap {

class HandedOut;
struct MasterRecord;

/// Note [Statistics are written back together]
/// Batch norm writes its running statistics and bumps no version, so the bytes of what a training module was
/// handed have to be looked at. On an accelerator each look would be a wait, and there are three buffers a
/// layer. So their records stay until the outermost call of an installed module ends on this thread; then all
/// are copied to pinned memory, and there is one wait. Whoever holds a master sees what the forward wrote
/// when the call has returned, as in plain torch; and earlier, when masters are asked for. A buffer that is
/// read again in the same call gets the same bytes. What a graph still holds after the call is not looked at
/// again: a backward pass writes no statistics, and other writes bump the version. Another thread that is
/// handed the buffer before the call has ended gets the same bytes, too.
///
/// LOCK: the GIL, but for keep_until_the_call_ends().

/// While one lives, its thread is inside the call of an installed module.
class InsideAnyCall {
 public:
  InsideAnyCall() noexcept;
  ~InsideAnyCall();
  InsideAnyCall(const InsideAnyCall&) = delete;
  InsideAnyCall& operator=(const InsideAnyCall&) = delete;
};

/// Whether this thread is inside the call of an installed module: what is read there is read by a forward,
/// and not by somebody who looks at the model.
bool inside_call() noexcept;

/// Watches a tensor that is handed out inside a call; write_back_buffers() looks at it when the call ends.
void write_back_after_call(const at::Tensor& handed_out);

/// The storage of a handed-out tensor has died. Takes the record if it is watched, inside a call, and not on
/// the CPU, where a look is no wait.
void keep_until_the_call_ends(std::unique_ptr<HandedOut>& record) noexcept;

/// Takes out and returns the record that keep_until_the_call_ends() has kept for a tensor of this master;
/// null if there is none.
std::unique_ptr<HandedOut> taken_back(const MasterRecord& master);

/// Writes the record that keep_until_the_call_ends() has kept for a tensor of this master, if any, back to
/// the master.
void write_back_kept(const MasterRecord& master);

/// Writes back what was written on a handed-out tensor that lives on; it may be the one that the next access
/// gives. Does nothing to any other storage. Other code may run in it.
void write_back_living(const c10::intrusive_ptr<c10::StorageImpl>& storage);

/// Writes back all records, also those whose tensors are alive: the call is over. With the GIL.
void write_back_buffers();

}  // namespace dynswap
