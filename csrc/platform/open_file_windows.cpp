#include "platform/open_file.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <system_error>

#include "platform/windows_api.h"

namespace dynswap {

namespace {

[[noreturn]] void fail(DWORD error = ::GetLastError()) {
  throw std::system_error(static_cast<int>(error), std::system_category());
}

HANDLE handle_of(std::intptr_t value) noexcept { return reinterpret_cast<HANDLE>(value); }

std::wstring wide(const std::string& utf8) {
  const auto convert = [&](wchar_t* to, int most) {
    return ::MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, utf8.data(), static_cast<int>(utf8.size()),
                                 to, most);
  };
  std::wstring result(static_cast<std::size_t>(convert(nullptr, 0)), L'\0');
  convert(result.data(), static_cast<int>(result.size()));
  return result;
}

/// Returns the event by which the calling thread waits for its reads.
HANDLE event_of_this_thread() {
  struct Event {
    HANDLE handle = ::CreateEventW(nullptr, /*bManualReset=*/TRUE, FALSE, nullptr);
    ~Event() { ::CloseHandle(handle); }
  };
  thread_local const Event event;
  return event.handle;
}

}  // namespace

// Overlapped, because reads through any other handle wait for one another. Other processes may write to the
// file, replace it and delete it, as on Linux.
OpenFile::OpenFile(const std::string& path)
    : handle_(reinterpret_cast<std::intptr_t>(::CreateFileW(
          wide(path).c_str(), GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr,
          OPEN_EXISTING, FILE_FLAG_OVERLAPPED | FILE_FLAG_SEQUENTIAL_SCAN, nullptr))) {
  if (handle_of(handle_) == INVALID_HANDLE_VALUE) fail();
}

OpenFile::OpenFile(Scratch, const std::string& folder) {
  static std::atomic<unsigned> made{0};
  const std::string path =
      folder + "\\dynswap-" + std::to_string(::GetCurrentProcessId()) + "-" + std::to_string(++made) + ".tmp";
  handle_ = reinterpret_cast<std::intptr_t>(
      ::CreateFileW(wide(path).c_str(), GENERIC_READ | GENERIC_WRITE, 0, nullptr, CREATE_NEW,
                    FILE_ATTRIBUTE_TEMPORARY | FILE_FLAG_DELETE_ON_CLOSE | FILE_FLAG_OVERLAPPED, nullptr));
  if (handle_of(handle_) == INVALID_HANDLE_VALUE) fail();
}

void OpenFile::reserve(std::uint64_t, std::uint64_t) const {}

void OpenFile::write(std::uint64_t offset, const std::byte* src, std::size_t bytes) const {
  while (bytes > 0) {
    OVERLAPPED at{};
    at.Offset = static_cast<DWORD>(offset);
    at.OffsetHigh = static_cast<DWORD>(offset >> 32);
    at.hEvent = event_of_this_thread();
    const auto some = static_cast<DWORD>(std::min<std::size_t>(bytes, 1u << 30));
    if (::WriteFile(handle_of(handle_), src, some, nullptr, &at) == 0 && ::GetLastError() != ERROR_IO_PENDING)
      fail();
    DWORD put = 0;
    if (::GetOverlappedResult(handle_of(handle_), &at, &put, /*bWait=*/TRUE) == 0) fail();
    offset += put;
    src += put;
    bytes -= put;
  }
}

std::optional<std::size_t> OpenFile::write_direct(std::uint64_t, const std::byte*, std::size_t) const {
  return std::nullopt;
}

OpenFile::~OpenFile() { ::CloseHandle(handle_of(handle_)); }

OpenFile::Status OpenFile::status() const {
  BY_HANDLE_FILE_INFORMATION info;
  if (::GetFileInformationByHandle(handle_of(handle_), &info) == 0) fail();
  const auto joined = [](DWORD high, DWORD low) { return std::uint64_t{high} << 32 | low; };
  constexpr std::uint64_t kNanosecondsPerTick = 100;
  return {::GetFileType(handle_of(handle_)) == FILE_TYPE_DISK, joined(info.nFileSizeHigh, info.nFileSizeLow),
          joined(info.nFileIndexHigh, info.nFileIndexLow), info.dwVolumeSerialNumber,
          static_cast<std::int64_t>(
              joined(info.ftLastWriteTime.dwHighDateTime, info.ftLastWriteTime.dwLowDateTime) *
              kNanosecondsPerTick)};
}

std::size_t OpenFile::read(std::uint64_t offset, std::byte* dst, std::size_t bytes) const {
  constexpr std::size_t kMost = 1u << 30;
  OVERLAPPED place{};
  place.Offset = static_cast<DWORD>(offset);
  place.OffsetHigh = static_cast<DWORD>(offset >> 32);
  place.hEvent = event_of_this_thread();
  DWORD got = 0;
  if (::ReadFile(handle_of(handle_), dst, static_cast<DWORD>(std::min(bytes, kMost)), nullptr, &place) == 0) {
    const DWORD error = ::GetLastError();
    if (error == ERROR_HANDLE_EOF) return 0;
    if (error != ERROR_IO_PENDING) fail(error);
  }
  if (::GetOverlappedResult(handle_of(handle_), &place, &got, /*bWait=*/TRUE) == 0) {
    const DWORD error = ::GetLastError();
    if (error == ERROR_HANDLE_EOF) return 0;
    fail(error);
  }
  return got;
}

std::optional<std::size_t> OpenFile::read_direct(std::uint64_t, std::span<const Part>) const {
  return std::nullopt;
}

bool OpenFile::is_cached(std::uint64_t, std::size_t) const noexcept { return false; }

void OpenFile::drop_cached(std::uint64_t, std::size_t) const noexcept {}

void OpenFile::end_read_ahead() const noexcept {}

}  // namespace dynswap
