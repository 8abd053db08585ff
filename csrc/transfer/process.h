// Whether this process may still call an accelerator's runtime.
#pragma once

namespace dynswap {

/// False once the process is exiting, and in a forked child: neither may call the runtime, and in the child
/// the threads that serve a backend do not exist.
bool devices_usable() noexcept;

/// Arranges that devices_usable() knows. Called after the runtime's first use and before the first object of
/// ours is made: handlers run in the opposite order, so ours runs before the runtime's own.
void watch_process() noexcept;

}  // namespace dynswap
