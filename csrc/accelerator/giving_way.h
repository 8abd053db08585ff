// Residents give way to whoever runs out of a device's memory.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "core/engine.h"

namespace dynswap {

/// While it lives, the engine's residents on the device give way: Note [Residents give way]. Thread-safe.
class GivesWay {
 public:
  GivesWay(const c10::Device& device, const std::shared_ptr<Engine>& engine);
  ~GivesWay();
  GivesWay(const GivesWay&) = delete;
  GivesWay& operator=(const GivesWay&) = delete;

 private:
  const std::shared_ptr<Engine> engine_;
};

/// Whether torch's allocator runs its callbacks for free memory, ours among them, before it gives up, whoever
/// allocates: on CUDA and ROCm. Elsewhere give_way() serves the engines' own
/// allocations.
bool runs_free_memory_callbacks(const c10::Device& device) noexcept;

/// Why it does not, and what to do about it; empty if it does.
const char* obstacle_to_free_memory_callbacks(const c10::Device& device) noexcept;

/// Lets torch's allocator give back to the driver what it keeps for nobody. Residents that are allocated next
/// are then not cut out of the blocks that activations will want again: these would have to come from the
/// driver, and where it has no more, residents would give way to what is kept in pieces.
void release_kept_memory(const c10::Device& device) noexcept;

/// Sets whether torch records the history of its memory. While it does, no resident gives way: Note [When
/// torch's allocator asks]. Only Python can ask torch.
void set_memory_history_recorded(bool recorded) noexcept;

/// Frees residents' memory for an allocation of ours that has failed. False if there was none, if the
/// allocator has asked already, or while torch records the history of its memory.
bool give_way(const c10::Device& device);

}  // namespace dynswap
