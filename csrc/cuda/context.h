// The device's context, made current for the length of a scope.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

struct CUctx_st;

namespace dynswap {

/// The primary context of one device, the one that torch uses too. Keeps it alive. Thread-safe.
///
/// Note [No cudaSetDevice]: setting a device and setting back the one before makes a context on both, and
/// a thread that never chose a device "has" device 0. A model on the second GPU would so take memory on
/// the first. Pushing the context that is wanted, and popping it, touches no other.
class DeviceContext {
 public:
  explicit DeviceContext(int device);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  int device() const noexcept { return device_; }

 private:
  friend class ContextGuard;
  int device_;
  CUctx_st* context_ = nullptr;
};

/// Around every CUDA call. Costs one look where the context is current already.
///
/// Note [Somebody captures a graph]: a capture in torch's default mode forbids every thread what could
/// synchronise: to ask whether an event is over, to wait for one, to allocate pinned memory. Who does it all
/// the same spoils the capture, and gets an error for an answer. Nothing of that is ever part of a capture
/// here, so each scope lets it be allowed for its thread. What is left: a stream that is captured cannot wait
/// for what is not, nor may an event be recorded on it that others ask or wait for. Backend::capturing()
/// tells.
class ContextGuard {
 public:
  explicit ContextGuard(const DeviceContext& context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  ///< the thread's own meanwhile
};

/// Whether work on the stream goes into a graph instead of being done. A context is current.
bool is_captured(cudaStream_t stream) noexcept;

}  // namespace dynswap
