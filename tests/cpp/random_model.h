// A random model: weights with bytes of their own, in modules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/engine.h"
#include "fake_device.h"
#include "random.h"

namespace dynswap::test {

class RandomModel {
 private:
  /// Of all masters ever, the poisoned too. First, so that it outlives the masters.
  std::vector<std::unique_ptr<std::vector<std::byte>>> buffers_;

 public:
  struct Weight {
    WeightId id = 0;
    Scalar scalar = Scalar::raw8;
    std::uint64_t count = 0;
    std::uint32_t version = 0;
    SourcePtr master;
    Expected expected;  ///< the master's bytes in this version
  };
  using Module = std::vector<std::size_t>;  ///< weights that are used together

  /// 5 to 40 weights of mixed sizes and types, one of them larger than the others; some are tied.
  explicit RandomModel(Random& random);

  /// Gives a weight a new master with other bytes. The old one's buffer is poisoned when its last owner lets
  /// go of it, so that a copy that runs too late, or from a source that nobody keeps, is seen.
  void renew(std::size_t index, Random& random);

  std::size_t bytes() const;

  std::vector<Weight> weights;
  std::vector<Module> units;    ///< each weight once, as the engine is told
  std::vector<Module> modules;  ///< as they are used: with the tied weights
};

}  // namespace dynswap::test
