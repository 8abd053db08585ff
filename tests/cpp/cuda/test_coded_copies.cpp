// Coded weights through the CUDA backend, over the pretend device: staged, page-locked and in small scratch
// blocks.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "coded_source.h"
#include "core/check.h"
#include "cuda_fixture.h"
#include "pretend_gpu.h"
#include "random.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kBlock = lossless::kBlockWeights;
constexpr std::array kFloating{Scalar::f64,  Scalar::f32,       Scalar::f16,
                               Scalar::bf16, Scalar::f8_e4m3fn, Scalar::f8_e5m2};

void expect_arrives(Fixture& fixture, const CodedWeights& weights, const SourcePtr& source,
                    std::uint64_t first, std::uint64_t count) {
  const Consumer consumer;
  const std::uint64_t begin = source->coded_first + first;
  const gpu::Block device(count * scalar_size(source->wanted));
  CopyRequest request;
  request.steps.push_back({{}, {{source, first, count, device.data()}}});
  const EventPtr copied = fixture.backend->copy(std::move(request));
  fixture.backend->wait(consumer.stream(), copied);
  bool same = false;
  consumer.enqueue([&] { same = device == right(weights, source->wanted, begin, count, gpu::cast); });
  consumer.finish();
  EXPECT(same);
}

TEST(cuda_coded_weights_from_everywhere_to_every_type) {
  Random random(31);
  for (const std::size_t blocks : {1, 3, 70}) {
    for (const Scalar type : kCodable) {
      Fixture fixture(random.next());
      if (random.chance(0.5)) fixture.most_bytes = 300u << 10;  // a scratch block of less than the piece
      const CodedWeights weights = some_weights(type, blocks * kBlock - random.below(kBlock), random.next());
      const TempFile file(48 + weights.coded.size(), 1);
      write_at(file.path(), 48, weights.coded);
      for (const Scalar wanted : kFloating) {
        const std::array<SourcePtr, 3> sources{weights.source(wanted), fixture.pinned(weights.source(wanted)),
                                               weights.source(wanted, file, 48)};
        for (const SourcePtr& source : sources) {
          expect_arrives(fixture, weights, source, 0, source->count);
          const std::uint64_t begin = random.below(source->count);
          const SourcePtr part = slice(source, begin, random.between(1, source->count - begin));
          const std::uint64_t first = random.below(part->count);
          expect_arrives(fixture, weights, part, first, random.between(1, part->count - first));
        }
      }
    }
  }
}

TEST(cuda_coded_bytes_cross_the_bus) {
  Fixture fixture;
  const CodedWeights weights(Scalar::bf16, trained(Scalar::bf16, 90 * kBlock, 32));
  const SourcePtr source = fixture.pinned(weights.source(Scalar::bf16));
  EXPECT(source->pinned && !source->pinned_copy);
  const std::uint64_t before = gpu::counts().kernels;
  expect_arrives(fixture, weights, source, 0, source->count);
  EXPECT_EQ(gpu::counts().kernels, before + 1);
  EXPECT_EQ(gpu::counts().host_functions, 0u);  // nothing is staged
}

TEST(cuda_coded_bytes_of_more_than_the_scratch_block) {
  Fixture fixture;
  fixture.most_bytes = 260u << 10;
  const CodedWeights weights(Scalar::bf16, trained(Scalar::bf16, 150 * kBlock, 36));
  expect_arrives(fixture, weights, weights.source(Scalar::bf16), 0, weights.count());
  EXPECT(gpu::counts().kernels > 2u);
}

TEST(cuda_a_device_without_kernels_is_sent_decoded_weights) {
  Fixture fixture;
  fixture.backend.reset();
  gpu::faults().kernel_error = static_cast<int>(cudaErrorNoKernelImageForDevice);
  std::string said;
  CudaOptions options = options_with_small_ring();
  options.allocate = [&](std::size_t bytes) {
    return StreamMemory{gpu::allocate(bytes), reinterpret_cast<Stream>(fixture.allocation_stream)};
  };
  options.warn = [&](const std::string& what) { said += what; };
  fixture.backend = make_cuda_backend(std::move(options));
  const CodedWeights weights = some_weights(Scalar::bf16, 20 * kBlock + 5, 33);
  for (const Scalar wanted : {Scalar::bf16, Scalar::f32}) {
    expect_arrives(fixture, weights, weights.source(wanted), 0, weights.count());
    expect_arrives(fixture, weights, fixture.pinned(weights.source(wanted)), 100, 9000);
  }
  EXPECT_EQ(gpu::counts().kernels, 0u);
  EXPECT(contains(said, "decoded, on the host"));
}

TEST(cuda_coded_weights_that_are_damaged_do_no_harm) {
  // Bytes that cross the bus coded are not looked at before; those that readers decode give an error.
  Fixture fixture;
  CodedWeights weights = some_weights(Scalar::bf16, 9 * kBlock, 34);
  weights.coded[weights.coding->blocks[5]] = std::byte{7};
  const Consumer consumer;
  const SourcePtr read = weights.source(Scalar::f8_e4m3fn);
  const gpu::Block device(2 * weights.count());
  const EventPtr failed = fixture.backend->copy(whole(read, device.data()));
  EXPECT_THROWS(fixture.backend->wait(consumer.stream(), failed), SourceError);
  const EventPtr sent = fixture.backend->copy(whole(weights.source(Scalar::bf16), device.data()));
  fixture.backend->wait(consumer.stream(), sent);
  bool same = false;
  consumer.enqueue([&] {
    const Bytes bytes = device.bytes(), expected = right(weights, Scalar::bf16, 0, 5 * kBlock, gpu::cast);
    same = std::equal(expected.begin(), expected.end(), bytes.begin());
  });
  consumer.finish();
  EXPECT(same);
}

TEST(cuda_coded_weights_beside_plain_ones_at_random) {
  Random random(35);
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    Fixture fixture(seed);
    if (random.chance(0.5)) fixture.most_bytes = 300u << 10;
    std::vector<CodedWeights> weights;
    weights.reserve(6);
    std::vector<gpu::Block> blocks;
    std::vector<Bytes> expected;
    CopyRequest request;
    request.steps.resize(2);
    for (int i = 0; i < 6; ++i) {
      const CodedWeights& each = weights.emplace_back(
          some_weights(kCodable[random.below(3)], random.between(1, 120 * kBlock), random.next()));
      const Scalar wanted = random.chance(0.5) ? each.type : kFloating[random.below(kFloating.size())];
      std::shared_ptr<Source> source = each.source(wanted);
      if (random.chance(0.3)) {
        source->coding = nullptr;
        source->address = each.plain.data();
      }
      const SourcePtr from = random.chance(0.5) ? fixture.pinned(source) : SourcePtr(source);
      const std::uint64_t first = random.below(each.count()), count = random.between(1, each.count() - first);
      blocks.emplace_back(count * scalar_size(wanted));
      expected.push_back(right(each, wanted, first, count, gpu::cast));
      request.steps[random.below(2)].pieces.push_back({from, first, count, blocks.back().data()});
    }
    const Consumer consumer;
    const EventPtr copied = fixture.backend->copy(std::move(request));
    fixture.backend->wait(consumer.stream(), copied);
    consumer.finish();
    for (std::size_t i = 0; i < blocks.size(); ++i) EXPECT(blocks[i] == expected[i]);
  }
}

}  // namespace
