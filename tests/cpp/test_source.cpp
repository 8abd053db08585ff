// A source of several parts: what a request makes of it, and slices.
#include "core/source.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "host/host_backend.h"
#include "stopped_host.h"
#include "temp_file.h"

namespace dynswap::test {

namespace {

std::shared_ptr<Source> in_memory(const std::byte* bytes, std::uint64_t count, Scalar stored = Scalar::raw8) {
  auto source = std::make_shared<Source>();
  source->name = "w";
  source->stored = stored;
  source->wanted = stored;
  source->count = count;
  source->address = bytes;
  return source;
}

/// One source of three parts that do not lie beside each other, and what it is in order.
struct InParts {
  std::vector<std::byte> bytes = random_bytes(64, 5);
  SourcePtr source = make();
  std::vector<std::byte> expected = joined();

 private:
  static constexpr std::size_t kParts[3][2] = {{40, 12}, {0, 8}, {20, 4}};

  SourcePtr make() const {
    auto whole = in_memory(nullptr, 24);
    for (const auto& [begin, count] : kParts) whole->parts.push_back(in_memory(bytes.data() + begin, count));
    return whole;
  }
  std::vector<std::byte> joined() const {
    std::vector<std::byte> all;
    for (const auto& [begin, count] : kParts)
      all.insert(all.end(), bytes.data() + begin, bytes.data() + begin + count);
    return all;
  }
};

std::vector<std::byte> read(const SourcePtr& source, std::uint64_t first, std::uint64_t count) {
  std::vector<std::byte> result(count * scalar_size(source->stored));
  std::uint64_t told = 0;
  for_each_part(source, first, count,
                [&](const SourcePtr& part, std::uint64_t from, std::uint64_t length, std::uint64_t done) {
                  EXPECT_EQ(done, told);
                  told += length;
                  const std::size_t size = scalar_size(part->stored);
                  std::copy_n(part->address + from * size, length * size, result.begin() + done * size);
                });
  EXPECT_EQ(told, count);
  return result;
}

}  // namespace

TEST(source_parts_are_read_in_order_from_any_element_on) {
  const InParts weight;
  for (std::uint64_t first = 0; first <= 24; ++first) {
    for (std::uint64_t count = 0; first + count <= 24; ++count) {
      const auto begin = weight.expected.begin() + static_cast<std::ptrdiff_t>(first);
      EXPECT(read(weight.source, first, count) ==
             std::vector<std::byte>(begin, begin + static_cast<std::ptrdiff_t>(count)));
    }
  }
}

TEST(source_slices_of_parts_and_of_slices) {
  const InParts weight;
  const SourcePtr part = slice(weight.source, 3, 18);
  EXPECT_EQ(part->count, 18u);
  EXPECT(read(part, 0, 18) == read(weight.source, 3, 18));
  EXPECT(read(slice(part, 9, 5), 0, 5) == read(weight.source, 12, 5));
}

TEST(source_slices_move_the_place_by_elements) {
  const std::vector<std::byte> bytes = random_bytes(64, 7);
  auto source = in_memory(bytes.data(), 16, Scalar::f32);
  source->offset = 100;
  source->pinned = true;
  const SourcePtr part = slice(source, 4, 8);
  EXPECT_EQ(part->address, bytes.data() + 16);
  EXPECT_EQ(part->offset, 116u);
  EXPECT_EQ(part->stored_bytes(), 32u);
  EXPECT(part->pinned);
  source->pinned_copy = std::make_shared<PinnedCopy>();
  EXPECT(!slice(source, 4, 8)->pinned);  // the copy is of the whole, so its slice is staged
}

TEST(engine_brings_a_source_of_several_parts) {
  const InParts weight;
  const auto engine =
      std::make_shared<Engine>(std::make_unique<HostBackend>(&Gate::cast, 1), EngineOptions());
  const WeightId id = engine->add_weight(weight.source, 0);
  engine->plan();
  Lease lease = engine->acquire(id, Stream{0});
  EXPECT(std::equal(weight.expected.begin(), weight.expected.end(), lease.data()));
  lease.release();
  engine->close();
}

}  // namespace dynswap::test
