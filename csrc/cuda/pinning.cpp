#include "cuda/pinning.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <set>
#include <utility>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_check.h"

namespace dynswap {

class PinRegistry::Handle {
 public:
  Handle(PinRegistry& registry, std::shared_ptr<const DeviceContext> context)
      : registry_(registry), context_(std::move(context)) {}
  ~Handle() { registry_.unlock(*this); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

 private:
  friend class PinRegistry;
  PinRegistry& registry_;
  const std::shared_ptr<const DeviceContext> context_;
  std::set<std::uintptr_t> held_;  ///< first bytes of the registrations that count this handle
};

PinRegistry& PinRegistry::of_this_process() {
  static PinRegistry* const registry = new PinRegistry;
  return *registry;
}

std::vector<PageRun> PinRegistry::runs(const std::vector<Lockable>& ranges, std::size_t page_bytes) {
  struct Span {
    PageRun run;
    bool small;
  };
  std::vector<Span> spans;
  for (const Lockable& range : ranges) {
    if (range.bytes == 0) continue;
    const auto first = reinterpret_cast<std::uintptr_t>(range.address);
    spans.push_back(
        {{first / page_bytes * page_bytes, (first + range.bytes + page_bytes - 1) / page_bytes * page_bytes},
         range.bytes < kSmall});
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.run.begin < b.run.begin; });

  std::vector<Span> merged;
  for (const Span& span : spans) {
    if (!merged.empty()) {
      Span& last = merged.back();
      const bool shares_page = span.run.begin < last.run.end;
      const bool small_neighbour = span.run.begin == last.run.end && span.small && last.small &&
                                   span.run.end - last.run.begin <= kLongestSharedRun;
      if (shares_page || small_neighbour) {
        last.run.end = std::max(last.run.end, span.run.end);
        last.small = last.small && span.small;
        continue;
      }
    }
    merged.push_back(span);
  }

  std::vector<PageRun> result;
  for (const Span& span : merged) {
    for (std::uintptr_t begin = span.run.begin; begin < span.run.end; begin += kLongestRun) {
      result.push_back({begin, std::min<std::uintptr_t>(begin + kLongestRun, span.run.end)});
    }
  }
  return result;
}

PinRegistry::Registrations::iterator PinRegistry::first_reaching(std::uintptr_t address) {
  auto found = registrations_.upper_bound(address);
  if (found != registrations_.begin() && std::prev(found)->second.end > address) --found;
  return found;
}

bool PinRegistry::changing(const PageRun& run) {
  for (auto it = first_reaching(run.begin); it != registrations_.end() && it->first < run.end; ++it) {
    if (it->second.state == Registration::State::changing) return true;
  }
  return false;
}

/// Counts the registrations under `run` for `handle`, and claims the gaps between them.
void PinRegistry::take(const PageRun& run, Handle& handle, std::vector<PageRun>& gaps) {
  std::uintptr_t at = run.begin;
  std::vector<PageRun> claimed;
  for (auto it = first_reaching(at); it != registrations_.end() && it->first < run.end; ++it) {
    if (at < it->first) claimed.push_back({at, it->first});
    if (handle.held_.insert(it->first).second) ++it->second.handles;
    at = it->second.end;
  }
  if (at < run.end) claimed.push_back({at, run.end});
  for (const PageRun& gap : claimed) {
    handle.held_.insert(gap.begin);
    registrations_[gap.begin] = {gap.end, 1, Registration::State::changing, {}};
    gaps.push_back(gap);
  }
}

std::shared_ptr<PinRegistry::Handle> PinRegistry::lock(const std::shared_ptr<const DeviceContext>& context,
                                                       const std::vector<Lockable>& ranges,
                                                       std::vector<bool>& locked, std::string& reason) {
  const auto handle = std::make_shared<Handle>(*this, context);
  const ContextGuard guard(*context);
  for (const PageRun& run : runs(ranges, static_cast<std::size_t>(sysconf(_SC_PAGESIZE)))) {
    std::vector<PageRun> gaps;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !changing(run); });
      take(run, *handle, gaps);
    }
    for (const PageRun& gap : gaps) {
      // Portable: pinned for every device of the process.
      const cudaError_t error =
          cudaHostRegister(reinterpret_cast<void*>(gap.begin), gap.end - gap.begin, cudaHostRegisterPortable);
      if (error != cudaSuccess) {
        (void)cudaGetLastError();  // else it would surface at the next, innocent call
        if (reason.empty()) reason = std::string(cudaGetErrorName(error)) + ", " + cudaGetErrorString(error);
      }
      {
        const std::lock_guard lock(mutex_);
        if (error == cudaSuccess) {
          registrations_[gap.begin].state = Registration::State::locked;
        } else {
          registrations_.erase(gap.begin);
          handle->held_.erase(gap.begin);
        }
      }
      changed_.notify_all();
    }
  }

  const std::lock_guard lock(mutex_);
  locked.assign(ranges.size(), false);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const auto begin = reinterpret_cast<std::uintptr_t>(ranges[i].address);
    std::uintptr_t at = begin;
    std::vector<Registration*> under;
    for (auto it = first_reaching(begin); it != registrations_.end() && at < begin + ranges[i].bytes; ++it) {
      if (it->first > at || !handle->held_.contains(it->first)) break;
      under.push_back(&it->second);
      at = it->second.end;
    }
    // The owner goes to whatever lies under it, locked as a whole or not.
    for (Registration* registration : under) registration->owners.push_back(ranges[i].owner);
    locked[i] = at >= begin + ranges[i].bytes;
  }
  return handle;
}

void PinRegistry::unlock(Handle& handle) noexcept {
  std::vector<std::uintptr_t> last;
  {
    const std::lock_guard lock(mutex_);
    for (const std::uintptr_t begin : handle.held_) {
      Registration& registration = registrations_.at(begin);
      if (--registration.handles > 0) continue;
      registration.state = Registration::State::changing;
      last.push_back(begin);
    }
  }
  for (const std::uintptr_t begin : last) {
    try {
      const ContextGuard guard(*handle.context_);
      DYNSWAP_CUDA_NOEXCEPT(cudaHostUnregister(reinterpret_cast<void*>(begin)));
    } catch (const std::exception&) {
      // the device is lost, and its registrations with it
    }
    std::vector<std::shared_ptr<const void>> owners;  // let go without the mutex
    {
      const std::lock_guard lock(mutex_);
      const auto found = registrations_.find(begin);
      owners = std::move(found->second.owners);
      registrations_.erase(found);
    }
    changed_.notify_all();
  }
}

std::size_t PinRegistry::run_length(const std::byte* address, std::size_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  auto found = registrations_.upper_bound(at);
  if (found == registrations_.begin()) return bytes;
  --found;
  return found->second.end <= at ? bytes : std::min<std::size_t>(bytes, found->second.end - at);
}

std::shared_ptr<void> pin(int device, std::vector<SourcePtr>& sources,
                          const std::function<void(const std::string&)>& refused) {
  std::vector<Lockable> ranges;
  std::vector<std::size_t> which;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const Source& source = *sources[i];
    if (source.pinned || source.file || source.address == nullptr || source.stored_bytes() == 0) continue;
    ranges.push_back({source.address, source.stored_bytes(), source.owner});
    which.push_back(i);
  }
  std::vector<bool> locked;
  std::string reason;
  auto handle = PinRegistry::of_this_process().lock(std::make_shared<const DeviceContext>(device), ranges,
                                                    locked, reason);
  std::size_t refused_bytes = 0;
  for (std::size_t i = 0; i < which.size(); ++i) {
    if (!locked[i]) {
      refused_bytes += ranges[i].bytes;
      continue;
    }
    auto source = std::make_shared<Source>(*sources[which[i]]);
    source->pinned = true;
    sources[which[i]] = std::move(source);
  }
  if (refused_bytes > 0 && refused) {
    refused("the system refused to page-lock " + std::to_string(refused_bytes) + " bytes of weights (" +
            reason +
            "): they go to the device through a small pinned buffer, which is slower. Raise the limit of "
            "locked memory (ulimit -l, or the container's), or pass pin=False to install() to have it so "
            "without this warning");
  }
  return handle;
}

}  // namespace dynswap
