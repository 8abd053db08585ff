// Weights are recognised as ranges of the file that they are mapped from.
#include "platform/mappings.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>

#include "check.h"
#include "temp_file.h"

namespace dynswap::test {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kBytes = 8 * kPage;

/// The file from its second page on.
std::shared_ptr<std::byte> map(const TempFile& file, int access, int flags) {
  const int descriptor = ::open(file.path().c_str(), O_RDWR);
  void* const address = ::mmap(nullptr, kBytes - kPage, access, flags, descriptor, kPage);
  ::close(descriptor);
  if (address == MAP_FAILED) throw std::runtime_error("cannot map a file");
  return {static_cast<std::byte*>(address), [](std::byte* begin) { ::munmap(begin, kBytes - kPage); }};
}

}  // namespace

TEST(mappings_find_the_offset_in_the_file) {
  const TempFile file(kBytes);
  const auto mapped = map(file, PROT_READ | PROT_WRITE, MAP_PRIVATE);
  const auto range = Mappings::of_this_process().find(mapped.get() + 100, kPage);
  EXPECT(range.has_value());
  EXPECT_EQ(range->path, file.path());
  EXPECT_EQ(range->offset, kPage + 100);
}

TEST(mappings_see_through_a_private_write) {
  const TempFile file(kBytes);
  const auto mapped = map(file, PROT_READ | PROT_WRITE, MAP_PRIVATE);
  mapped.get()[3 * kPage] = std::byte{1};
  ::mprotect(mapped.get() + kPage, kPage, PROT_READ);  // splits the mapping in three
  const auto range = Mappings::of_this_process().find(mapped.get(), kBytes - kPage);
  EXPECT(range.has_value());
  EXPECT_EQ(range->offset, kPage);
}

TEST(mappings_end_where_the_mapping_ends) {
  const TempFile file(kBytes);
  const auto mapped = map(file, PROT_READ, MAP_PRIVATE);
  EXPECT(!Mappings::of_this_process().find(mapped.get() + kPage, kBytes).has_value());
}

TEST(mappings_of_several_files_back_to_back_are_parts) {
  const TempFile one(kBytes), other(kBytes);
  const auto mapped = map(one, PROT_READ | PROT_WRITE, MAP_PRIVATE);
  const int descriptor = ::open(other.path().c_str(), O_RDWR);
  std::byte* const joint = mapped.get() + 2 * kPage;
  constexpr int kInPlace = MAP_PRIVATE | MAP_FIXED;
  ::mmap(joint, 2 * kPage, PROT_READ | PROT_WRITE, kInPlace, descriptor, 5 * kPage);
  ::close(descriptor);
  ::mmap(mapped.get() + 4 * kPage, kPage, PROT_READ | PROT_WRITE, kInPlace | MAP_ANONYMOUS, -1, 0);

  const Mappings mappings = Mappings::of_this_process();
  EXPECT(!mappings.find(mapped.get() + 100, 3 * kPage).has_value());
  EXPECT(mappings.holds_any(mapped.get() + 4 * kPage, kPage + 1));
  EXPECT(!mappings.holds_any(mapped.get() + 4 * kPage, kPage));
  const std::vector<Mappings::Part> parts = mappings.parts_of(mapped.get() + 100, 5 * kPage);
  EXPECT_EQ(parts.size(), 4u);
  EXPECT_EQ(parts[0].bytes, 2 * kPage - 100);
  EXPECT_EQ(parts[0].range->path, one.path());
  EXPECT_EQ(parts[0].range->offset, kPage + 100);
  EXPECT_EQ(parts[1].bytes, 2 * kPage);
  EXPECT_EQ(parts[1].range->path, other.path());
  EXPECT_EQ(parts[1].range->offset, 5 * kPage);
  EXPECT_EQ(parts[2].bytes, kPage);
  EXPECT(!parts[2].mapped && !parts[2].range.has_value());
  EXPECT_EQ(parts[3].bytes, 100u);
  EXPECT_EQ(parts[3].range->offset, 6 * kPage);
}

TEST(mappings_leave_out_what_is_plain_memory_to_us) {
  const auto heap = std::make_unique<std::byte[]>(kBytes);
  const TempFile shared_file(kBytes);
  const auto shared = map(shared_file, PROT_READ | PROT_WRITE, MAP_SHARED);
  auto deleted_file = std::make_unique<TempFile>(kBytes);
  const auto deleted = map(*deleted_file, PROT_READ, MAP_PRIVATE);
  deleted_file.reset();
  const Mappings mappings = Mappings::of_this_process();
  EXPECT(!mappings.find(heap.get(), kPage).has_value());
  EXPECT(!mappings.find(shared.get(), kPage).has_value());
  EXPECT(!mappings.find(deleted.get(), kPage).has_value());
}

}  // namespace dynswap::test
