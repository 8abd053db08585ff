// The backend over an NVIDIA GPU: what the rest of the extension sees of it. No CUDA header is needed to
// include this.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/lockable.h"
#include "transfer/pinned_copies.h"
#include "transfer/transfer_stream.h"

namespace dynswap {

struct CudaOptions : StreamOptions {
  int device = 0;

  /// The CUDA handle of a consumer's stream. Null: a Stream is the handle itself.
  std::function<Stream(Stream)> native_handle;

  /// Is told what makes this backend less than it could be, in a sentence for the user. May be null.
  std::function<void(const std::string&)> warn;
};

/// Throws DeviceError if there is no such device, or its driver is too old.
std::unique_ptr<Backend> make_cuda_backend(CudaOptions options);

/// Page-locks what lies in plain RAM as far as it may be and the system allows, and replaces those sources by
/// ones that say so: the master in place where its block may be locked, or is already, and a copy where
/// it is small. The others stay as they are. Returns a sentence for the user about those, empty if there is
/// nothing to say. Takes seconds for gigabytes. Throws DeviceError only if there is no such device.
std::string pin(int device, PinnedCopies& copies, std::vector<Lockable>& items);

/// How many devices the runtime that is linked finds; 0 where there is none. Throws DeviceError, in CUDA's
/// words, where it cannot say: a driver too old for the runtime, a process forked from one that had used
/// CUDA. Makes no context, but wakes the driver: a process forked afterwards cannot use CUDA.
int cuda_device_count();

/// The functions of csrc/cuda that the extension calls, if it was linked with them.
struct LinkedCuda {
  decltype(&make_cuda_backend) make_backend;
  decltype(&pin) pin_masters;
  decltype(&cuda_device_count) device_count;
  int runtime_version;  ///< as CUDA counts: 13000 is 13.0
};

/// Set while the extension is loaded; null in one that was linked without csrc/cuda. So the same objects make
/// an extension with CUDA and one without.
inline constinit const LinkedCuda* linked_cuda = nullptr;

}  // namespace dynswap
