// Ranks of a process group of torch.distributed.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <vector>

#include "mesh/ranks.h"

namespace dynswap {

/// Two backends of one group of ranks, which nobody else uses, because each rank has to begin the collectives
/// of a backend in the same order.
struct RanksOfGroup {
  c10::intrusive_ptr<c10d::Backend> for_device;  ///< gathers on the device
  c10::intrusive_ptr<c10d::Backend> for_host;    ///< of tensors in RAM
  c10::intrusive_ptr<c10d::Store> store;         ///< of these ranks alone
  std::vector<std::size_t> numbers;              ///< of these ranks among all of the program
};

std::unique_ptr<Ranks> ranks_of(const RanksOfGroup& group, const c10::Device& device);

/// A number for the place of a source's bytes, as GatheredCopies::Identity says: in a file, of which this
/// process has written to no page, or in memory of map_shared_tensor().
std::uint64_t place_on_host(const Source& source);

}  // namespace dynswap
