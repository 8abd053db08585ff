// The autograd nodes between a handed-out tensor and its master.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>

#include "io/memory_watch.h"
#include "tensor/gradient_nodes.h"

namespace dynswap {

/// Makes `handed_out` (no history, not a leaf yet) the result of fetching `master`: gradients reach the
/// master on its device and in its dtype (Invariant 7), as by the backward of `master.to(device, dtype)`, and
/// differentiable like it.
///
/// Note [Gradients travel on a stream of their own]
/// From an accelerator they are copied into pinned memory on a side stream, after the work that made them, in
/// the smaller of the two dtypes. The node that follows belongs to the CPU: the autograd engine runs it on
/// the thread that called backward(), which has nothing else to do there, and it waits for its copy. So the
/// device goes on with the backward pass meanwhile, and whoever gets a gradient (accumulation, the
/// parameter's hooks, the caller after backward()) gets it whole.
///
/// `watch` counts each gradient as a write to the master, unless it sees every write by itself: an optimizer
/// step is likely to follow, which may bump no version. Null if the master is not watched.
///
/// `known` is the weight's (Note [Uses of a weight share a node]). `to` is where the gradient goes: to the
/// master (gradient_target_of()), or for a slice to gradient_target_of_slice().
void connect_to_master(const at::Tensor& handed_out, const at::Tensor& master, const GradientTarget& to,
                       const std::shared_ptr<MemoryWatch>& watch, GradientNodes& known);

/// May let other threads have the GIL.
GradientTarget gradient_target_of(const at::Tensor& master);
/// Where the gradient of the master's slice goes, which `view` is: to a node that puts the gradients of all
/// slices together, so that the master gets one of its size, however many were used. `to` is where that one
/// goes (gradient_edge_of()), and `known` the master's.
GradientTarget gradient_target_of_slice(const at::Tensor& master, const torch::autograd::Edge& to,
                                        const at::Tensor& view, std::int64_t index, GradientNodes& known);

}  // namespace dynswap
