#include "system.h"

#include <filesystem>
#include <stdexcept>

#include "platform/windows_api.h"
// After windows.h, which it needs.
#include <tlhelp32.h>

namespace dynswap::test {

bool has_memory(const void* address) {
  MEMORY_BASIC_INFORMATION info{};
  return ::VirtualQuery(address, &info, sizeof(info)) != 0 && info.State == MEM_COMMIT;
}

std::size_t threads_of_this_process() {
  const HANDLE all = ::CreateToolhelp32Snapshot(TH32CS_SNAPTHREAD, 0);
  THREADENTRY32 thread{};
  thread.dwSize = sizeof(thread);
  std::size_t count = 0;
  for (BOOL more = ::Thread32First(all, &thread); more != 0; more = ::Thread32Next(all, &thread)) {
    if (thread.th32OwnerProcessID == ::GetCurrentProcessId()) ++count;
  }
  ::CloseHandle(all);
  return count;
}

void evict(const std::string&) {}

std::uint64_t requests() { return 0; }

PrivateMapping::PrivateMapping(const std::string& path) : bytes_(std::filesystem::file_size(path)) {
  const HANDLE file = ::CreateFileA(path.c_str(), GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE, nullptr,
                                    OPEN_EXISTING, 0, nullptr);
  const HANDLE mapping = ::CreateFileMappingW(file, nullptr, PAGE_WRITECOPY, 0, 0, nullptr);
  data_ = static_cast<std::byte*>(::MapViewOfFile(mapping, FILE_MAP_COPY, 0, 0, 0));
  ::CloseHandle(mapping);
  ::CloseHandle(file);
  if (data_ == nullptr) throw std::runtime_error("cannot map " + path);
}

PrivateMapping::~PrivateMapping() { ::UnmapViewOfFile(data_); }

}  // namespace dynswap::test
