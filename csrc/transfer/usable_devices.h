// Whether this process may still call an accelerator's runtime.
#pragma once

namespace dynswap {

/// False once the process is exiting, and in a forked child: neither may call the runtime, and in the child
/// the threads that serve a backend do not exist.
bool devices_usable() noexcept;

/// Keeps devices_usable() up to date from now on. Has to be called after the runtime's first use and before
/// our first object is made: exit handlers run in the reverse order, so ours then runs before the runtime's.
void watch_process() noexcept;

}  // namespace dynswap
