// Page-locking: whose pages, how often, and for how long.
#include "cuda/pinning.h"

#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/cuda_backend.h"
#include "fake_cudart.h"

namespace {

using namespace dynswap;

const std::size_t kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

/// Whole pages.
struct Pages {
  explicit Pages(std::size_t count) : bytes(count * kPage) {
    address = static_cast<std::byte*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  ~Pages() { munmap(address, bytes); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* address;
  std::size_t bytes;
};

SourcePtr source(const std::byte* address, std::size_t bytes, std::shared_ptr<const void> owner = {}) {
  auto result = std::make_shared<Source>();
  result->address = address;
  result->count = bytes;
  result->owner = std::move(owner);
  return result;
}

std::size_t registered_pages() { return fake_cuda::counts().registered / kPage; }

void expect_nothing_left() {
  EXPECT_EQ(registered_pages(), 0u);
  for (const std::string& what : fake_cuda::violations()) test::fail(__FILE__, __LINE__, what);
}

TEST(pin_locks_the_pages_of_the_sources_and_no_other) {
  fake_cuda::reset();
  const Pages pages(16);
  std::vector<SourcePtr> sources{source(pages.address + kPage + 10, 100),
                                 source(pages.address + 5 * kPage, kPage + 1),
                                 source(pages.address + 12 * kPage - 1, 2)};
  auto handle = pin(0, sources);
  EXPECT_EQ(registered_pages(), 1u + 2u + 2u);
  for (const SourcePtr& each : sources) EXPECT(each->pinned);
  handle.reset();
  expect_nothing_left();
}

TEST(pin_counts_pages_that_engines_share) {
  fake_cuda::reset();
  const Pages pages(8);
  std::vector<SourcePtr> first{source(pages.address, 3 * kPage + 7)};
  std::vector<SourcePtr> second{source(pages.address + 3 * kPage + 7, 3 * kPage)};
  std::vector<SourcePtr> same{source(pages.address, 3 * kPage + 7)};
  auto a = pin(0, first);
  EXPECT_EQ(registered_pages(), 4u);
  auto b = pin(0, second);
  EXPECT_EQ(registered_pages(), 7u);
  auto c = pin(0, same);
  EXPECT_EQ(registered_pages(), 7u);
  a.reset();
  EXPECT_EQ(registered_pages(), 7u);
  c.reset();
  EXPECT_EQ(registered_pages(),
            7u);  // the page in the middle is still the second's, and so is the run it is in
  b.reset();
  expect_nothing_left();
}

TEST(pin_cuts_copies_where_a_registration_ends) {
  fake_cuda::reset();
  const Pages pages(8);
  std::vector<SourcePtr> first{source(pages.address, 2 * kPage)};
  std::vector<SourcePtr> second{source(pages.address + kPage, 3 * kPage)};
  const auto a = pin(0, first);
  const auto b = pin(0, second);
  EXPECT(second[0]->pinned);
  const PinRegistry& registry = PinRegistry::of_this_process();
  EXPECT_EQ(registry.run_length(pages.address + kPage, 3 * kPage), kPage);
  EXPECT_EQ(registry.run_length(pages.address + 2 * kPage, 2 * kPage), 2 * kPage);
  EXPECT_EQ(registry.run_length(pages.address + 6 * kPage, 100), 100u);
}

TEST(pin_refused_is_said_once_and_leaves_the_source_as_it_is) {
  fake_cuda::reset();
  fake_cuda::faults().register_at_most = 4 * kPage;
  const Pages pages(16);
  std::vector<SourcePtr> sources{source(pages.address, 2 * kPage),
                                 source(pages.address + 4 * kPage, 10 * kPage),
                                 source(pages.address + 15 * kPage, 8)};
  int warnings = 0;
  std::string said;
  auto handle = pin(0, sources, [&](const std::string& message) {
    ++warnings;
    said = message;
  });
  EXPECT(sources[0]->pinned);
  EXPECT(!sources[1]->pinned);
  EXPECT_EQ(warnings, 1);
  EXPECT(said.find(std::to_string(10 * kPage)) != std::string::npos);
  handle.reset();
  expect_nothing_left();
}

TEST(pin_keeps_the_bytes_of_what_it_locks) {
  fake_cuda::reset();
  auto pages = std::make_shared<Pages>(2);
  const std::weak_ptr<Pages> watched = pages;
  std::vector<SourcePtr> sources{source(pages->address, 100, pages)};
  auto handle = pin(0, sources);
  pages.reset();
  sources.clear();
  EXPECT(!watched.expired());
  handle.reset();
  EXPECT(watched.expired());
  expect_nothing_left();
}

TEST(pin_leaves_files_and_the_already_pinned_alone) {
  fake_cuda::reset();
  const Pages pages(2);
  auto locked_by_torch = std::make_shared<Source>(*source(pages.address, 100));
  locked_by_torch->pinned = true;
  std::vector<SourcePtr> sources{locked_by_torch, source(nullptr, 100), source(pages.address, 0)};
  const auto handle = pin(0, sources);
  EXPECT_EQ(registered_pages(), 0u);
  EXPECT(sources[0] == locked_by_torch);
}

TEST(pin_runs_are_short_and_keep_large_tensors_apart) {
  const auto lockable = [](std::uintptr_t begin, std::size_t bytes) {
    return Lockable{reinterpret_cast<const std::byte*>(begin), bytes, nullptr};
  };
  const std::uintptr_t base = std::uintptr_t{1} << 40;
  const std::size_t large = std::size_t{5} << 29;  // 2.5 GiB
  const auto huge = PinRegistry::runs({lockable(base, large)}, 4096);
  EXPECT_EQ(huge.size(), 3u);
  for (const PageRun& run : huge) EXPECT(run.end - run.begin <= PinRegistry::kLongestRun);
  EXPECT_EQ(huge.front().begin, base);
  EXPECT_EQ(huge.back().end, base + large);

  const std::size_t tensor = std::size_t{4} << 20;
  EXPECT_EQ(PinRegistry::runs({lockable(base, tensor), lockable(base + tensor, tensor)}, 4096).size(), 2u);
  // ... unless they share a page, or are small
  EXPECT_EQ(PinRegistry::runs({lockable(base, tensor - 1), lockable(base + tensor - 1, tensor)}, 4096).size(),
            1u);
  EXPECT_EQ(PinRegistry::runs({lockable(base + 4096, 4096), lockable(base, 4096)}, 4096).size(), 1u);
}

TEST(pin_from_many_threads) {
  fake_cuda::reset();
  const Pages pages(64);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (std::size_t k = 0; k < 200; ++k) {
        std::vector<SourcePtr> sources{source(pages.address + ((7 * i + k) % 40) * kPage + 3, 9 * kPage)};
        const auto handle = pin(0, sources);
        EXPECT(sources[0]->pinned && fake_cuda::is_locked(sources[0]->address, sources[0]->count));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect_nothing_left();
}

}  // namespace
