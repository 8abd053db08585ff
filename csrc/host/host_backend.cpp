#include "host/host_backend.h"

#include <memory>
#include <string>

#include "core/align.h"
#include "core/amount.h"
#include "core/check.h"
#include "platform/memory.h"

namespace dynswap {

namespace {

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
  void* const address = map_memory(mapped);
  if (address == nullptr) {
    throw OutOfMemory("cannot allocate " + amount(bytes) + " of RAM for streamed weights");
  }
  return Memory(static_cast<std::byte*>(address),
                [mapped](std::byte* memory) { unmap_memory(memory, mapped); });
}

EventPtr HostBackend::mark(Stream) { return std::make_shared<Mark>(now()); }

}  // namespace dynswap
