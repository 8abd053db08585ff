#include "random_model.h"

#include <algorithm>
#include <string>
#include <utility>

namespace dynswap::test {

namespace {

constexpr std::byte kGone{0xEE};  // what a master's buffer holds once nobody owns it

}  // namespace

RandomModel::RandomModel(Random& random) {
  const std::size_t n = random.between(5, 40);
  const std::size_t typical = std::size_t{16} << random.below(5);
  const std::size_t largest = random.below(n);
  for (std::size_t i = 0; i < n; ++i) {
    constexpr Scalar kScalars[] = {Scalar::raw8, Scalar::raw16, Scalar::f32, Scalar::raw64};
    Weight weight;
    weight.scalar = kScalars[random.below(4)];
    const std::size_t bytes = i == largest ? 6 * typical : random.between(8, 2 * typical);
    weight.count = std::max<std::uint64_t>(1, bytes / scalar_size(weight.scalar));
    weights.push_back(std::move(weight));
    renew(i, random);
    if (units.empty() || random.chance(0.6)) units.emplace_back();
    units.back().push_back(i);
  }
  modules = units;
  for (Module& module : modules) {
    if (random.chance(0.05)) module.push_back(random.below(n));
  }
}

void RandomModel::renew(std::size_t index, Random& random) {
  Weight& weight = weights[index];
  ++weight.version;
  auto bytes = std::make_shared<std::vector<std::byte>>(weight.count * scalar_size(weight.scalar));
  for (std::byte& byte : *bytes) byte = static_cast<std::byte>(random.next());
  weight.expected = bytes;

  auto buffer = std::make_unique<std::vector<std::byte>>(*bytes);
  auto source = std::make_shared<Source>();
  source->name = "weight " + std::to_string(index);
  source->stored = source->wanted = weight.scalar;
  source->count = weight.count;
  source->address = buffer->data();
  source->owner = std::shared_ptr<void>(
      nullptr, [buffer = buffer.get()](void*) { std::fill(buffer->begin(), buffer->end(), kGone); });
  buffers_.push_back(std::move(buffer));
  weight.master = std::move(source);
}

std::size_t RandomModel::bytes() const {
  std::size_t total = 0;
  for (const Weight& weight : weights) total += weight.expected->size();
  return total;
}

}  // namespace dynswap::test
