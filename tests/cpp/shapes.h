// The weights of real models, in the order of use, for the virtual clock.
#pragma once

#include <cstdint>
#include <string>

#include "sim/roofline.h"

namespace dynswap::test {

/// What the time of a weight's kernels is in proportion to.
enum class Compute {
  bytes,       ///< bound by memory: one token, a small batch
  operations,  ///< elements times `uses`: how often each is multiplied (a convolution's pixels), relative
};

/// Builds a workload in bf16.
class Shape {
 public:
  Shape& weight(const std::string& name, std::uint64_t elements, double uses = 1) {
    workload_.layers.push_back({name, 2 * elements, static_cast<double>(elements) * uses, unit_});
    return *this;
  }
  /// What follows belongs to the next module.
  Shape& module() {
    ++unit_;
    return *this;
  }
  Shape& linear(const std::string& name, std::uint64_t in, std::uint64_t out, bool bias, double uses = 1) {
    module().weight(name + ".weight", in * out, uses);
    return bias ? weight(name + ".bias", out, 0) : *this;
  }
  Shape& norm(const std::string& name, std::uint64_t size, bool bias = false) {
    module().weight(name + ".weight", size, 0);
    return bias ? weight(name + ".bias", size, 0) : *this;
  }
  Shape& convolution(const std::string& name, std::uint64_t in, std::uint64_t out, std::uint64_t kernel,
                     double uses) {
    return module().weight(name + ".weight", in * out * kernel * kernel, uses).weight(name + ".bias", out, 0);
  }

  std::uint64_t bytes() const;
  /// The workload whose pass computes for `ratio` times as long as all its bytes take on the bus.
  sim::Workload balance(Compute compute, double ratio, double bytes_per_second) const;

 private:
  sim::Workload workload_;
  std::uint64_t unit_ = 0;
};

Shape uniform(std::size_t layers, std::uint64_t elements);
Shape llama_3_8b();
Shape flux_transformer();
Shape sdxl_unet();

}  // namespace dynswap::test
