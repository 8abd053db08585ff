// The pretend device (tests/device) as the C++ tests of csrc/cuda use it. Its runtime is what they link in
// place of CUDA's.
//
// The kernels are replaced (launch_cast, launch_decode), as nothing compiles them here, by the same
// conversions on the device's thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/backend.h"
#include "core/scalar.h"
#include "device/machine.h"

namespace dynswap::gpu {

using pretend::counts;
using pretend::faults;
using pretend::violations;

/// Begins again: an order of the device's work, drawn from the seed, and no faults.
void reset(std::uint64_t seed = 1, pretend::Order order = pretend::Order::mixed);

/// True if all of it is page-locked.
bool is_locked(const void* address, std::size_t bytes);

/// A stream of the test's, and work on it, for the device's one thread.
cudaStream_t make_stream();
void destroy_stream(cudaStream_t stream);
void enqueue(cudaStream_t stream, std::function<void()> work);
void finish(cudaStream_t stream);
/// While it is captured, nobody may record on it, nor make it wait.
void capture(cudaStream_t stream, bool captured);
/// Nothing later on the stream runs for that long.
void delay(cudaStream_t stream, std::chrono::nanoseconds length);

/// Device memory as a backend's allocator gives it.
Memory allocate(std::size_t bytes);
/// The bytes behind a device address. For work that is enqueued, and for a host that has waited for it.
std::byte* bytes_at(const void* address);

/// Device memory of the test's.
class Block {
 public:
  explicit Block(std::size_t bytes) : memory_(allocate(bytes)), bytes_(bytes) {}
  std::byte* data() const { return memory_.get(); }
  std::vector<std::byte> bytes() const;
  bool operator==(const std::vector<std::byte>& other) const;
  /// Whether nothing that is queued writes to it: runs all of it.
  bool at_rest() const;

 private:
  Memory memory_;
  std::size_t bytes_;
};

/// The conversions that are compared with torch's elsewhere. Into f8_e4m3fn: some function of the value.
void cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count);

}  // namespace dynswap::gpu
