// Threads and forks of this process, and the libraries that are loaded in it.
#pragma once

#include <cstdint>
#include <functional>

#include "platform/fork_safe.h"

namespace dynswap {

/// The id by which Python's threading module knows the calling thread.
std::uint64_t thread_id() noexcept;

/// Starts a thread that blocks every signal: signals belong to the interpreter's main thread. Linux shows
/// the `name`, of 15 characters at most, in top and in debuggers.
Thread start_thread(const char* name, std::function<void()> run);

/// Has functions called at each fork() of this process from now on: before it, and after it in the parent and
/// in the child. Null for none. Returns false if there is no memory for that. On Windows no process forks.
bool at_fork(void (*before)(), void (*in_parent)(), void (*in_child)()) noexcept;

/// A function of a library that is loaded in this process; null if there is none of this name.
void* loaded_function(const char* name) noexcept;
/// A function of the loaded library with this file name, even if its symbols are local to it; null if there
/// is none of this name.
void* loaded_function(const char* name, const char* library) noexcept;

}  // namespace dynswap
