// The device's context, made current for the length of a scope.
#pragma once

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
class ContextGuard {
 public:
  explicit ContextGuard(const DeviceContext& context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace dynswap
