// Small buffers that a training module's forward is handed, and that it may write without a trace.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace dynswap {

struct DeferredRelease;
class HandedOut;
class Session;
struct Weight;

/// Note [Statistics are written back together]
/// Batch norm writes its running statistics and bumps no version, so the bytes of what a training module was
/// handed have to be looked at. On an accelerator each look would be a wait, and there are three buffers a
/// layer. So their records stay until the outermost call of an installed module ends on this thread; then all
/// are copied to pinned memory, and there is one wait. Whoever holds a master sees what the forward wrote
/// when the call has returned, as in plain torch; and earlier, when masters are asked for. A buffer that is
/// read again in the same call gets the same bytes. What a graph still holds after the call is not looked at
/// again: a backward pass writes no statistics, and other writes bump the version.
///
/// LOCK: each thread has its own.

/// Watches a tensor that is handed out inside a call; write_back_buffers() looks at it when the call ends.
void write_back_after_call(const at::Tensor& handed_out);

/// The storage of a handed-out tensor has died. Takes the record if it is watched, inside a call, and not on
/// the CPU, where a look is no wait.
void keep_until_the_call_ends(std::unique_ptr<HandedOut>& record) noexcept;

/// The weight's record that was kept so, if there is one.
std::unique_ptr<HandedOut> taken_back(const Weight& weight);

/// Writes back what was written on the record that was kept.
void write_back_kept(const Weight& weight);

/// Writes back what was written on a handed-out tensor that lives on; it may be the one that the next access
/// gives. Does nothing to any other storage. Returns the session, if there still is one.
std::shared_ptr<Session> write_back_living(const c10::intrusive_ptr<c10::StorageImpl>& storage,
                                           DeferredRelease& dropped);
/// Writes back as above, and lets go of what is dropped at once: other code may run in that.
std::shared_ptr<Session> write_back_living(const c10::intrusive_ptr<c10::StorageImpl>& storage);

/// Writes back all records, also those whose tensors are alive: the call is over. With the GIL.
void write_back_buffers();

}  // namespace dynswap
