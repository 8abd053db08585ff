#include "platform/process.h"

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "platform/windows_api.h"
// After windows.h, which it needs.
#include <psapi.h>

namespace dynswap {

std::uint64_t thread_id() noexcept { return ::GetCurrentThreadId(); }

// Signals interrupt no thread on Windows.
Thread start_thread(const char*, std::function<void()> run) { return Thread(std::thread(std::move(run))); }

bool at_fork(void (*)(), void (*)(), void (*)()) noexcept { return true; }

void* loaded_function(const char* name) noexcept {
  std::array<HMODULE, 1024> modules;
  DWORD bytes = 0;
  if (::K32EnumProcessModules(::GetCurrentProcess(), modules.data(), sizeof(modules), &bytes) == 0)
    return nullptr;
  const std::size_t count = std::min(bytes / sizeof(HMODULE), modules.size());
  for (std::size_t i = 0; i < count; ++i) {
    if (const FARPROC found = ::GetProcAddress(modules[i], name)) return reinterpret_cast<void*>(found);
  }
  return nullptr;
}

void* loaded_function(const char* name, const char* library) noexcept {
  const HMODULE loaded = ::GetModuleHandleA(library);
  return loaded == nullptr ? nullptr : reinterpret_cast<void*>(::GetProcAddress(loaded, name));
}

}  // namespace dynswap
