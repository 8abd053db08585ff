#include "kernels.h"

#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>

#include "cuda/cast_loop.h"
#include "cuda/decode_loop.h"

namespace pretend {
namespace {

using Launch = Work (*)(void** arguments, std::size_t threads);

/// The kernels' own loops, one thread or one warp after the other.
struct CastKernel {
  template <class To, class From>
  static Work work(void** arguments, std::size_t threads) {
    const auto to = *static_cast<To**>(arguments[0]);
    const auto from = *static_cast<const From**>(arguments[1]);
    const auto count = *static_cast<std::size_t*>(arguments[2]);
    const auto runs = *static_cast<std::size_t*>(arguments[3]);
    return [=] {
      auto* const dst = reinterpret_cast<To*>(hidden(to));
      const auto* const src = reinterpret_cast<const From*>(hidden(from));
      for (std::size_t thread = 0; thread < threads; ++thread) {
        dynswap::cast_loop(dst, src, count, runs, thread, threads);
      }
    };
  }
};
struct DecodeKernel {
  template <class To, class From>
  static Work work(void** arguments, std::size_t threads) {
    if constexpr (sizeof(From) == 2 || std::is_same_v<From, float>) {
      const auto to = *static_cast<To**>(arguments[0]);
      auto from = *static_cast<dynswap::Decoding*>(arguments[1]);
      return [=]() mutable {
        auto* const dst = reinterpret_cast<To*>(hidden(to));
        from.coded = hidden(from.coded);
        from.index = reinterpret_cast<const std::uint64_t*>(hidden(from.index));
        const std::size_t warps = threads / dynswap::kLanes;
        for (std::size_t warp = 0; warp < warps; ++warp) {
          dynswap::decode_on_host<To, From>(dst, from, warp, warps);
        }
      };
    } else {
      return nullptr;
    }
  }
};

template <class Kernel, class To>
Launch launch_from(const std::string& from) {
  if (from == "double") return &Kernel::template work<To, double>;
  if (from == "float") return &Kernel::template work<To, float>;
  if (from == "dynswap::F16") return &Kernel::template work<To, dynswap::F16>;
  if (from == "dynswap::BF16") return &Kernel::template work<To, dynswap::BF16>;
  if (from == "dynswap::F8E4M3FN") return &Kernel::template work<To, dynswap::F8E4M3FN>;
  if (from == "dynswap::F8E5M2") return &Kernel::template work<To, dynswap::F8E5M2>;
  return nullptr;
}

template <class Kernel>
Launch launch_of(const std::string& to, const std::string& from) {
  if (to == "double") return launch_from<Kernel, double>(from);
  if (to == "float") return launch_from<Kernel, float>(from);
  if (to == "dynswap::F16") return launch_from<Kernel, dynswap::F16>(from);
  if (to == "dynswap::BF16") return launch_from<Kernel, dynswap::BF16>(from);
  if (to == "dynswap::F8E5M2") return launch_from<Kernel, dynswap::F8E5M2>(from);
  return nullptr;
}

std::mutex mutex;
std::map<const void*, Launch>& launches() {
  static auto* const all = new std::map<const void*, Launch>;
  return *all;
}

}  // namespace

void register_kernel(const void* handle, const char* mangled) {
  char* const demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr);
  const std::string name = demangled == nullptr ? mangled : demangled;
  std::free(demangled);
  // "void dynswap::...::cast_kernel<double, float>(double*, ...)"
  const auto open = name.find("_kernel<"), comma = name.find(", ", open), close = name.find('>', comma);
  if (open == std::string::npos || close == std::string::npos) return;
  const std::string to = name.substr(open + 8, comma - open - 8),
                    from = name.substr(comma + 2, close - comma - 2);
  const bool decodes = name.find("decode_kernel<") != std::string::npos;
  const std::lock_guard lock(mutex);
  launches()[handle] = decodes ? launch_of<DecodeKernel>(to, from) : launch_of<CastKernel>(to, from);
}

Work kernel(const void* handle, void** arguments, std::size_t threads) {
  Launch launch = nullptr;
  {
    const std::lock_guard lock(mutex);
    const auto found = launches().find(handle);
    if (found == launches().end() || found->second == nullptr) return nullptr;
    launch = found->second;
  }
  return launch(arguments, threads);
}

}  // namespace pretend
