// A CUDA runtime without a GPU, as far as csrc/cuda calls it: streams are threads that dawdle, events
// keep the point that a wait saw, "device memory" is RAM. What the real one forbids is counted as a
// violation: a call without a context, a call in a host function, a page registered twice, an object
// destroyed twice. Pages are locked whole, and a copy that spans locked and other pages, or two
// registrations, is refused.
//
// The kernels are replaced too (launch_cast), by the same conversions on the stream's thread.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/scalar.h"

namespace dynswap::fake_cuda {

/// Forgets violations, counts and faults. Streams, events and registrations of before must be gone.
void reset(std::uint64_t seed = 1);

/// What the driver cannot, or will not, do.
struct Faults {
  bool no_batches = false;                  ///< cudaMemcpyBatchAsync is not supported
  int fail_copy = 0;                        ///< the copy with this number (from 1) is refused
  int fail_host_function = 0;               ///< likewise
  std::size_t register_at_most = SIZE_MAX;  ///< bytes that may be page-locked in place in all
  bool locks_bytes = false;                 ///< and not all of their pages
  bool no_host_memory = false;              ///< cudaHostAlloc fails
  int query_error = 0;                      ///< the cudaError_t that event queries answer with
  bool no_kernels = false;                  ///< none was compiled for the device
  std::chrono::hours later{0};              ///< what is recorded from now on is recorded so much later
};
Faults& faults();

std::vector<std::string> violations();

struct Counts {
  std::size_t copies = 0;
  std::size_t batches = 0;
  std::size_t pageable_copies = 0;  ///< from memory that is not page-locked: these would block
  std::size_t casts = 0;
  std::size_t host_functions = 0;
  std::size_t synchronisations = 0;
  std::size_t events = 0;        ///< alive
  std::size_t timed_events = 0;  ///< ever made
  std::size_t streams = 0;       ///< alive
  std::size_t registered = 0;    ///< bytes page-locked in place
  std::size_t contexts = 0;      ///< retained
};
Counts counts();

/// True if all of it is page-locked.
bool is_locked(const void* address, std::size_t bytes);

/// A stream of the test's, and work on it.
cudaStream_t make_stream();
void destroy_stream(cudaStream_t stream);
void enqueue(cudaStream_t stream, std::function<void()> work);
void finish(cudaStream_t stream);
/// While it is captured, nobody may record on it, nor make it wait.
void capture(cudaStream_t stream, bool captured);

/// The conversions that are compared with torch's elsewhere. Into f8_e4m3fn: some function of the value.
void cast(void* dst, Scalar dst_type, const void* src, Scalar src_type, std::size_t count);

}  // namespace dynswap::fake_cuda
