// Which fused experts are read as a whole, and so are not served by slices.
#pragma once

#include <c10/core/TensorImpl.h>

#include <unordered_set>
#include <utility>
#include <vector>

namespace dynswap {

/// Parameters of fused experts that an operation has read as a whole, by their addresses. The next plan
/// streams them so, unless the budget is too small for one of them.
/// LOCK: the GIL guards it.
class ReadWhole {
 public:
  using Set = std::unordered_set<const c10::TensorImpl*>;

  bool contains(const c10::TensorImpl* parameter) const { return read_.contains(parameter); }
  const Set& all() const noexcept { return read_; }
  /// Notes a read of all of it. False if that is known already, or if no plan has room for it.
  bool note(const c10::TensorImpl* parameter) {
    return !too_large_.contains(parameter) && read_.insert(parameter).second;
  }

  /// A plan has room for these.
  void plan_holds(Set parameters) { planned_ = std::move(parameters); }
  /// Those that no plan has had room for yet.
  std::vector<const c10::TensorImpl*> unplanned() const {
    std::vector<const c10::TensorImpl*> found;
    for (const c10::TensorImpl* const each : read_) {
      if (!planned_.contains(each)) found.push_back(each);
    }
    return found;
  }
  /// From now on it is served by slices: the budget does not hold it.
  void refuse(const c10::TensorImpl* parameter) {
    read_.erase(parameter);
    too_large_.insert(parameter);
  }
  /// Another budget may hold what was refused.
  void ask_again() { too_large_.clear(); }

 private:
  Set read_;
  Set planned_;
  Set too_large_;
};

}  // namespace dynswap
