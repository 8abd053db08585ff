// Which blocks of malloc's have their pages for themselves.
#include "platform/own_pages.h"

#include <cstdlib>
#include <memory>
#include <vector>

#include "check.h"

namespace {

using namespace dynswap;

struct Freed {
  void operator()(void* block) const { std::free(block); }
};

std::unique_ptr<std::byte, Freed> block(std::size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes) != 0) std::abort();
  return std::unique_ptr<std::byte, Freed>(static_cast<std::byte*>(memory));
}

TEST(own_pages_of_blocks_that_are_mapped_for_themselves) {
  constexpr std::size_t kMapped = 40u << 20;  // more than glibc ever takes from its heap
  const auto mapped = block(kMapped + 1);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  EXPECT(!has_own_pages(mapped.get(), kMapped + 1));  // malloc is the sanitizer's
#else
  EXPECT(has_own_pages(mapped.get(), kMapped + 1));
  EXPECT(!has_own_pages(mapped.get(), kMapped + 8192));  // not all of it is the block
#endif
}

TEST(own_pages_of_neighbours_in_a_heap_are_none) {
  const auto freed = block(4u << 20);  // from here on blocks of this size come from the heap
  std::vector<std::unique_ptr<std::byte, Freed>> blocks;
  for (const std::size_t bytes : {100u, 5000u, 70'000u, 100'000u}) {
    for (int i = 0; i < 20; ++i) {
      blocks.push_back(block(bytes + static_cast<std::size_t>(i) * 64));
      EXPECT(!has_own_pages(blocks.back().get(), bytes));
    }
  }
  EXPECT(!has_own_pages(nullptr, 10));
}

}  // namespace
