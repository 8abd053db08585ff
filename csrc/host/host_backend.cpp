#include "host/host_backend.h"

#include <sys/mman.h>

#include <memory>
#include <string>

#include "core/check.h"

namespace dynswap {

namespace {

constexpr std::size_t kHugePage = 2u << 20;

/// A consumer is the calling thread, which passes a mark as it makes it.
class Mark final : public Event {
 public:
  explicit Mark(std::int64_t at) noexcept : at_(at) {}
  bool done() const noexcept override { return true; }
  std::optional<Interval> when() const noexcept override { return Interval{at_, at_}; }

 private:
  const std::int64_t at_;
};

}  // namespace

Memory HostBackend::allocate(std::size_t bytes) {
  const std::size_t mapped =
      align_up(bytes > 0 ? bytes : 1, kDirectAlign);  // an overflow to 0 is refused too
  void* const address = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) {
    throw OutOfMemory("cannot allocate " + std::to_string(bytes) + " bytes of RAM for streamed weights");
  }
  // Fewer page faults, and fewer pages for the disk to look up. Advice only: a refusal changes nothing.
  if (mapped >= kHugePage) ::madvise(address, mapped, MADV_HUGEPAGE);
  return Memory(static_cast<std::byte*>(address), [mapped](std::byte* memory) { ::munmap(memory, mapped); });
}

EventPtr HostBackend::mark(Stream) { return std::make_shared<Mark>(now()); }

}  // namespace dynswap
