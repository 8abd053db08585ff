// What an error of CUDA or HIP says about the work that was enqueued before it.
#pragma once

#include <algorithm>
#include <array>

namespace dynswap {

/// Whether a device that answers so has given up all that was enqueued: nothing of it reads or writes any
/// more. HIP has the same numbers, where it has them. cudaErrorUnknown is not among them: CUDA does not say
/// what it leaves behind.
inline bool ends_all_work(int error) noexcept {
  constexpr std::array kEnding{
      4,    // cudaErrorCudartUnloading
      214,  // cudaErrorECCUncorrectable
      220,  // cudaErrorNvlinkUncorrectable
      226,  // cudaErrorContained
      700,  // cudaErrorIllegalAddress
      702,  // cudaErrorLaunchTimeout
      709,  // cudaErrorContextIsDestroyed
      710,  // cudaErrorAssert
      714,  // cudaErrorHardwareStackError
      715,  // cudaErrorIllegalInstruction
      716,  // cudaErrorMisalignedAddress
      717,  // cudaErrorInvalidAddressSpace
      718,  // cudaErrorInvalidPc
      719,  // cudaErrorLaunchFailure
      721,  // cudaErrorTensorMemoryLeak
      810,  // cudaErrorMpsClientTerminated
      911,  // cudaErrorExternalDevice
  };
  return std::find(kEnding.begin(), kEnding.end(), error) != kEnding.end();
}

}  // namespace dynswap
