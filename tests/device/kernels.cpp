#include "kernels.h"

#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "cuda/cast_loop.h"

namespace pretend {
namespace {

using Cast = void (*)(void* to, const void* from, std::size_t count, std::size_t runs, std::size_t threads);

/// The kernel's own loop, one thread after the other.
template <class To, class From>
void cast(void* to, const void* from, std::size_t count, std::size_t runs, std::size_t threads) {
  for (std::size_t thread = 0; thread < threads; ++thread) {
    dynswap::cast_loop(static_cast<To*>(to), static_cast<const From*>(from), count, runs, thread, threads);
  }
}

template <class To>
Cast cast_from(const std::string& from) {
  if (from == "double") return &cast<To, double>;
  if (from == "float") return &cast<To, float>;
  if (from == "dynswap::F16") return &cast<To, dynswap::F16>;
  if (from == "dynswap::BF16") return &cast<To, dynswap::BF16>;
  if (from == "dynswap::F8E4M3FN") return &cast<To, dynswap::F8E4M3FN>;
  if (from == "dynswap::F8E5M2") return &cast<To, dynswap::F8E5M2>;
  return nullptr;
}

Cast cast_of(const std::string& to, const std::string& from) {
  if (to == "double") return cast_from<double>(from);
  if (to == "float") return cast_from<float>(from);
  if (to == "dynswap::F16") return cast_from<dynswap::F16>(from);
  if (to == "dynswap::BF16") return cast_from<dynswap::BF16>(from);
  if (to == "dynswap::F8E5M2") return cast_from<dynswap::F8E5M2>(from);
  return nullptr;
}

std::mutex mutex;
std::map<const void*, Cast>& casts() {
  static auto* const all = new std::map<const void*, Cast>;
  return *all;
}

}  // namespace

void register_kernel(const void* handle, const char* mangled) {
  char* const demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr);
  const std::string name = demangled == nullptr ? mangled : demangled;
  std::free(demangled);
  // "void dynswap::...::cast_kernel<double, float>(double*, ...)"
  const auto open = name.find("cast_kernel<"), comma = name.find(", ", open), close = name.find('>', comma);
  if (open == std::string::npos || close == std::string::npos) return;
  const std::string to = name.substr(open + 12, comma - open - 12),
                    from = name.substr(comma + 2, close - comma - 2);
  const std::lock_guard lock(mutex);
  casts()[handle] = cast_of(to, from);
}

Work kernel(const void* handle, void** arguments, std::size_t threads) {
  Cast cast = nullptr;
  {
    const std::lock_guard lock(mutex);
    const auto found = casts().find(handle);
    if (found == casts().end() || found->second == nullptr) return nullptr;
    cast = found->second;
  }
  void* const to = *static_cast<void**>(arguments[0]);
  const void* const from = *static_cast<const void**>(arguments[1]);
  const std::size_t count = *static_cast<std::size_t*>(arguments[2]);
  const std::size_t runs = *static_cast<std::size_t*>(arguments[3]);
  return [=] { cast(hidden(to), hidden(from), count, runs, threads); };
}

}  // namespace pretend
