// A plan that is not in effect yet.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "session/module_state.h"
#include "session/session.h"

namespace dynswap {

/// Note [A plan takes another's place]
/// Whenever the GIL is released (while masters are page-locked, groups are formed, memory is freed and
/// allocated) other threads may be anywhere in the model. So a plan is drafted with weights of its own, while
/// the old plan goes on serving. take_over() then gives each module its new weights, without releasing the
/// GIL. carry_out() frees the old plan's memory before it allocates the new plan's, so that the device never
/// needs both; in between, each access copies. An access that began with an old weight goes on with the old
/// engine, or, if that is closed, with a private copy. What it was handed stays the weight's (hand_on()).
/// Residents that both plans have stay on the device (Note [Residents go from plan to plan]), if their
/// masters have not changed when take_over() looks. What changes later, the new weights notice.
struct Session::Draft {
  struct Module {
    py::object state;
    std::vector<Entry> entries;  ///< as they will be
  };

  explicit Draft(const Budget& budget) : plan(std::make_shared<Plan>(budget)) {}
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;
  ~Draft() {
    for (Module& module : modules) {
      for (Entry& entry : module.entries) entry.bind(nullptr);
    }
  }

  std::shared_ptr<WeightTable> table;   ///< of its own
  std::shared_ptr<WeightTable> before;  ///< in whose place it is
  Streamed streamed;
  std::vector<Module> modules;
  /// The state of an unchanged master when take_over() bound its new weight. carry_out() copies it again if
  /// that has changed since.
  struct Unchanged {
    WeightId earlier;  ///< the id in the plan before
    std::uint32_t version;
    std::uint64_t writes;
  };
  std::vector<std::optional<Unchanged>> unchanged;  ///< by WeightId
  const std::shared_ptr<Plan> plan;
};

/// Whether the bytes of `earlier` on the device are those of `weight`, if the master is unchanged.
bool same_device_bytes(const Weight& earlier, const Weight& weight);

}  // namespace dynswap
