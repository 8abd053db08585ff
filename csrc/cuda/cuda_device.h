// A CUDA device: its context, made current for the length of a scope, its streams and its events.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "transfer/stream_device.h"

struct CUctx_st;

namespace dynswap {

inline cudaStream_t cuda_stream(StreamHandle stream) noexcept {
  return reinterpret_cast<cudaStream_t>(stream);
}

/// The primary context of one device, the one that torch uses too. Keeps it alive. Thread-safe.
///
/// Note [No cudaSetDevice]: setting a device and setting back the one before makes a context on both, and
/// a thread that never chose a device "has" device 0. A model on the second GPU would so take memory on
/// the first. Pushing the context that is wanted, and popping it, touches no other.
class CudaDevice final : public StreamDevice {
 public:
  /// `native_handle`: the CUDA handle of a consumer's stream; null: a Stream is the handle itself. Throws
  /// DeviceError if there is no such device, or its driver is too old.
  explicit CudaDevice(int device, std::function<Stream(Stream)> native_handle = nullptr);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  /// Costs one look where the context is current already.
  Entered enter() const override;
  void leave(const Entered& entered) const noexcept override;

  StreamHandle make_copy_stream() const override;
  void destroy_copy_stream(StreamHandle stream) const noexcept override;
  StreamHandle handle_of(Stream consumer) const override {
    return native_handle_ ? native_handle_(consumer) : consumer;
  }
  bool captured(StreamHandle stream) const noexcept override;
  void synchronise(StreamHandle stream) const override;
  DeviceEventPtr make_event(bool timed) const override;

 private:
  const int device_;
  const std::function<Stream(Stream)> native_handle_;
  CUctx_st* context_ = nullptr;
};

}  // namespace dynswap
