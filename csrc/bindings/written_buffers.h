// Small buffers that a training module's forward is handed, and that it may write without a trace.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace dynswap {

class HandedOut;
struct Weight;

/// Note [Statistics come home together]
/// Batch norm writes its running statistics and bumps no version, so the bytes of what a training module was
/// handed have to be looked at. On an accelerator each look would be a wait, and there are three buffers a
/// layer. So their records stay until the outermost call of an installed module ends on this thread; then all
/// are copied to pinned memory, and there is one wait. Whoever holds a master sees what the forward wrote
/// when the call has returned, as in plain torch; and earlier, when masters are asked for. A buffer that is
/// read again in the same call gets the same bytes. What a graph still holds after the call is not looked at
/// again: a backward pass writes no statistics, and other writes bump the version.
///
/// LOCK: each thread has its own.

/// Watches a tensor that is handed out inside a call, until the call ends.
void bring_home_with_the_call(const at::Tensor& handed_out);

/// The storage of a handed-out tensor has died. Takes the record if it is watched, inside a call, and not on
/// the CPU, where a look is no wait.
void keep_until_the_call_ends(std::unique_ptr<HandedOut>& record) noexcept;

/// The weight's record that was kept so, if there is one.
std::unique_ptr<HandedOut> taken_back(const Weight& weight);

/// Takes to its master what was written on the record that was kept.
void bring_home(const Weight& weight);

/// The same for all, also those whose tensors are alive: the call is over. With the GIL.
void bring_home();

}  // namespace dynswap
