// The weights of the masters of one model.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "session/hooks.h"
#include "session/read_whole.h"
#include "session/weight.h"
#include "tensor/master_memory.h"

namespace dynswap {

struct Entry;

/// Which weights there are, which masters share one (ties), what each master is to its session, and what is
/// held of their memory. A new plan has a table of its own.
/// LOCK: the GIL guards it.
class WeightTable {
 public:
  struct Settings {
    at::Device device;
    std::optional<at::ScalarType> dtype;
    std::shared_ptr<PinnedCopies> copies;  ///< null: nothing is page-locked
    Keep keep = Keep::yes;                 ///< of checkpoint files, in the page cache
    /// Masters that are not to be sliced, as they are read as a whole. Never null.
    std::shared_ptr<const ReadWhole> read_whole;
  };
  /// Weights that travel together (Engine::add_weight()).
  struct Unit {
    std::uint64_t number = 0;
    WeightOptions options;    ///< by use: it is an expert
    std::int64_t slices = 0;  ///< how many experts its parameters have; 0: they are not sliced
  };
  /// What is asked for a module's weights.
  struct Choice {
    Unit unit;
    bool served = true;  ///< false: the module is left alone
    py::object keep;     ///< a frozenset of names, or null
    py::object ignore;   ///< a frozenset of names, or null
  };
  /// Weights that stream, each with its unit.
  struct Streamed {
    using Units = std::vector<std::pair<Weight*, Unit>>;
    Units first;  ///< every weight, with the unit of the module that was found first
    Units again;  ///< those that other modules have too
  };

  /// `hooks` outlives the table.
  WeightTable(const Settings& settings, const Hooks& hooks);

  /// All weights, in the order in which they were found. The list may grow while Python code runs.
  const std::vector<std::shared_ptr<Weight>>& weights() const noexcept { return weights_; }
  /// Makes room for so many masters, which are about to come.
  void expect(std::size_t masters);
  /// The weight of a master, or null. Masters are compared by address, which may be that of one that has
  /// died.
  Weight* find(const c10::TensorImpl* master) const noexcept;
  /// The weight of a master; a new one if there is none.
  Weight& weight_of(PyObject* master, const std::string& name, bool parameter, const Mappings& mappings,
                    Casting casting, std::int64_t slices = 0);
  /// The weights of a module's masters, bound to its entries; those that stream are added to `streamed`.
  /// Entries that are to be ignored are marked, and get no weight.
  void find_weights(PyObject* module_dict, const std::string& prefix, const Choice& choice,
                    MappingsOfMasters& mappings, std::vector<Entry>& entries, Streamed& streamed);
  /// Gives the weight another master, or the same one with other memory or another layout. Returns what it
  /// had of the earlier one, to be released after the change (Note [Release after the change]).
  [[nodiscard]] std::shared_ptr<const void> replace_master(Weight& weight, PyObject* master);
  /// Has the weight follow its master, which was coded, to the memory where it has plain values by now.
  /// Returns what replace_master() does.
  [[nodiscard]] std::shared_ptr<const void> follow_plain(Weight& weight, MasterContent& content);
  /// Drops weights of no plan, which nobody uses and whose masters have died.
  void sweep();

  /// Whether some master is, or was, copied by torch (Weight::AccessPath::copied).
  bool copies_any() const noexcept { return copies_any_; }

  /// Page-locks the masters of weights that stream, as far as it may be; releases the GIL for a while.
  /// Returns what is to be told the user.
  std::string pin(const std::string& backend, const std::vector<Weight*>& weights);
  /// Calls `use` for the weight of each of the masters, and for its parts; masters of others are ignored.
  void for_weights(const std::vector<at::Tensor>& masters, const std::function<void(Weight&)>& use) const;
  /// Bytes of masters that are sampled: a small write to them that bumps no version may go unseen.
  std::size_t sampled_bytes() const;
  /// Gives the masters their memory back, which is no longer held. Only once no copy reads it any more.
  void drop_bytes();
  /// In a forked child: forgets what is held.
  void abandon() noexcept { memory_->abandon(); }

 private:
  struct Kind;
  Kind kind_of(const Weight& weight, PyObject* master, const Mappings& mappings, std::int64_t slices);
  bool slice(Kind& kind, const Weight& weight, PyObject* master_object, const Mappings& mappings,
             std::int64_t slices);
  std::shared_ptr<const void> classify(Weight& weight, PyObject* master, const Mappings& mappings,
                                       std::int64_t slices = 0);

  const Settings settings_;
  const Hooks& hooks_;
  std::vector<std::shared_ptr<Weight>> weights_;
  /// A master may have died, and its address be another's by now: the weight's `state` tells.
  std::unordered_map<const c10::TensorImpl*, Weight*> by_master_;
  bool copies_any_ = false;
  std::size_t sweep_at_ = 0;  ///< weights, among which there may be unused ones
  std::shared_ptr<MasterMemory> memory_ = std::make_shared<MasterMemory>();  ///< never null
};

}  // namespace dynswap
