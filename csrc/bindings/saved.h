// What autograd saves of weights that are not resident is a reference, and backward fetches them again.
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
/// torch asks only the innermost hooks. Hooks of the user's own inside a module's call therefore see, and
/// keep, what they would without an install. Those of torch.utils.checkpoint are an exception: they hold
/// nothing in the forward pass, but in backward they would hold all weights of the part that is computed
/// again. Where a module is called right under them, ours stand over them, and give them a stand-in of the
/// weight's shape without its bytes, as they count what is saved.
class RefetchInBackward {
 public:
  /// Whether what is saved now would be kept whole, and does not have to be.
  static bool wanted();

  RefetchInBackward();
  ~RefetchInBackward();
  RefetchInBackward(const RefetchInBackward&) = delete;
  RefetchInBackward& operator=(const RefetchInBackward&) = delete;
};

}  // namespace dynswap
