// The saved-tensor hooks under which an installed module's call runs.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace dynswap {

/// Note [Backward fetches again]
/// An operation saves its weight for backward, and with it the lease on the weight's slot: after a forward
/// pass the graph would hold all of the model. So an installed module's call runs under saved-tensor hooks
/// that keep of a streamed weight which one it is, what view of it was saved, and the version of its
/// master; backward acquires it again, which the engine learns, and prefetches, like any other order. A
/// weight that torch copies (Weight::AccessPath::copied) is copied again. Everything else is saved as without
/// hooks, its version checked as torch checks it.
///
/// Note [Hooks of others]
/// torch asks only the innermost hooks. Where those are somebody else's, as a module is called or a weight is
/// read, ours stand over them, and go on asking them of every tensor. Of a weight, streamed or resident, they
/// are given what plain torch would have saved: the parameter, or a view of it. So they tell it from
/// activations as they do in a plain model (by its class, its memory, an attribute), and nothing that they
/// keep is a slot. If they give that back, they left it alone, and backward fetches the weight again; if they
/// give back something else (they compress, or keep copies), that is used, where and in the dtype in which
/// the weight was.
///
/// Those of torch.utils.checkpoint hold nothing in the forward pass, but in backward they would hold all
/// weights of the part that is computed again. They compare the device and dtype of what is saved in both
/// passes, and so get a stand-in of the weight's shape without its bytes.
class RefetchInBackward {
 public:
  /// Whether saved tensors are to go through hooks of ours, and do not.
  static bool wanted();
  /// Whether hooks of ours can stand over the innermost ones: they are not ours already.
  static bool possible();
  /// Whether the innermost hooks want to see the tensors themselves; not those of torch.utils.checkpoint.
  static bool seen_by_others();
  /// In a call: puts ours in the place of hooks that somebody has pushed since it began, over these. Who pops
  /// them pops ours.
  static void stand_over_others();

  RefetchInBackward();
  ~RefetchInBackward();
  RefetchInBackward(const RefetchInBackward&) = delete;
  RefetchInBackward& operator=(const RefetchInBackward&) = delete;
};

}  // namespace dynswap
