// What is page-locked where, and how much of it; and copies for a device that reads nothing that is locked in
// place.
#include "transfer/page_locking.h"

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "core/amount.h"
#include "core/backend.h"
#include "core/host_memory.h"
#include "lockable_memory.h"
#include "platform/memory.h"
#include "transfer/copy_plan.h"
#include "transfer/pinned_copies.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

constexpr std::size_t kBytes = 256u << 10;  // of a large master

/// Pages that the kernel watches, as those of a large tensor.
struct Master {
  explicit Master(std::size_t size = kBytes) : bytes(size), data(static_cast<std::byte*>(map_memory(size))) {
    std::memset(data, 1, bytes);
    context = HeldBytes::Context(data, [](void*) {});
  }
  ~Master() { unmap_memory(data, bytes); }
  Master(const Master&) = delete;
  Master& operator=(const Master&) = delete;

  Lockable lockable() { return lockable_memory(context, data, bytes); }

  const std::size_t bytes;
  std::byte* const data;
  HeldBytes::Context context{nullptr, nullptr};
};

/// The driver of some device, which may lock nothing in place.
struct Driver : PageLocker {
  explicit Driver(bool locks) : locks_in_place(locks) {}
  bool is_locked(const std::byte*) override { return false; }
  std::string locks_nothing() const override { return locks_in_place ? "" : "this device locks nothing"; }
  std::shared_ptr<void> lock(std::byte*, std::size_t bytes, std::string&) override {
    locked += bytes;
    return {this, [this, bytes](void*) { locked -= bytes; }};
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string&) override {
    copied += bytes;
    return {new std::byte[bytes], [this, bytes](std::byte* block) {
              copied -= bytes;
              delete[] block;
            }};
  }
  const bool locks_in_place;
  std::size_t locked = 0, copied = 0;
};

void unpin(std::vector<Lockable>& items) {
  for (Lockable& item : items) {
    if (item.locked) item.held->unlock();
  }
  items.clear();
}

/// How a request for the whole of it would go, and from which bytes.
struct Path {
  CopyPath path;
  int byte = -1;
};
Path path_of(const SourcePtr& source) {
  CopyRequest request;
  request.steps.push_back({{}, {{source, 0, source->count, nullptr}}});
  refresh_pinned_copies(request);
  const Source& settled = *request.steps[0].pieces[0].source;
  const CopyPath path = copy_path(settled, DeviceAbilities{});
  if (path == CopyPath::staged) return {path};
  const auto batches = plan_copies(request, DeviceAbilities{}, nullptr, nullptr);
  return {path, static_cast<int>(batches.at(0).landings.at(0).from[settled.count - 1])};
}

bool watches_pages(const Master& master) {
  Driver device(/*locks=*/false);
  std::vector<Lockable> items{const_cast<Master&>(master).lockable()};
  PinnedCopies copies;
  page_lock(device, copies, items);
  return items[0].source->pinned;
}

TEST(page_locking_copies_a_large_master_where_nothing_is_locked_in_place) {
  Master master;
  if (!watches_pages(master)) return;  // the kernel is older than Linux 6.7: see the next test
  Driver device(/*locks=*/false);
  std::vector<Lockable> items{master.lockable()};
  PinnedCopies copies;
  EXPECT_EQ(page_lock(device, copies, items), "");
  const SourcePtr source = items[0].source;
  EXPECT_EQ(device.locked, 0u);
  EXPECT_EQ(device.copied, kBytes);

  EXPECT(path_of(source).path == CopyPath::staged);  // it may be written to at each pass, by an optimizer
  EXPECT_EQ(path_of(source).byte, 1);
  EXPECT_EQ(path_of(source).byte, 1);
  for (int step = 2; step < 5; ++step) {
    master.data[kBytes - 1] = static_cast<std::byte>(step);  // bumps no version
    EXPECT(path_of(source).path == CopyPath::staged);
  }
  EXPECT_EQ(path_of(source).byte, 4);
}

TEST(page_locking_stays_within_the_room_for_copies) {
  Master first, second;
  if (!watches_pages(first)) return;
  Driver device(/*locks=*/false);
  const auto limit = HostMemory::limit({.copies = kBytes + 1});
  PinnedCopies copies;
  std::vector<Lockable> items{first.lockable(), second.lockable()};
  const std::string said = page_lock(device, copies, items);
  EXPECT(said.find(amount(kBytes) + " of weights") == 0);
  EXPECT(said.find("this device locks nothing, and page-locked copies of them would take more than half") !=
         std::string::npos);
  EXPECT(items[0].source->pinned && !items[1].source->pinned);
  EXPECT_EQ(device.copied, kBytes);
  EXPECT(path_of(items[1].source).path == CopyPath::staged);

  // The next plan of the session, made before this one goes.
  std::vector<Lockable> next{first.lockable()};
  EXPECT_EQ(page_lock(device, copies, next), "");
  EXPECT(next[0].source->pinned_copy == items[0].source->pinned_copy);
  unpin(items);
  unpin(next);
  EXPECT_EQ(device.copied, 0u);

  std::vector<Lockable> other{second.lockable()};
  EXPECT_EQ(page_lock(device, copies, other), "");
  EXPECT(other[0].source->pinned);
}

TEST(page_locking_in_place_stays_within_the_limit_and_says_nothing) {
  Master first, second, small(8u << 10);
  Driver device(/*locks=*/true);
  const auto limit = HostMemory::limit({.locked = kBytes + small.bytes});
  PinnedCopies copies;
  std::vector<Lockable> items{first.lockable(), second.lockable(), small.lockable()};
  EXPECT_EQ(page_lock(device, copies, items), "");
  EXPECT(items[0].source->pinned && !items[1].source->pinned && items[2].source->pinned);
  EXPECT_EQ(device.locked, kBytes);
  EXPECT_EQ(device.copied, small.bytes);
  std::vector<Lockable> more{second.lockable()};
  EXPECT_EQ(page_lock(device, copies, more), "");
  EXPECT(!more[0].source->pinned);
  unpin(items);
  EXPECT_EQ(device.locked + device.copied, 0u);
  EXPECT_EQ(page_lock(device, copies, more), "");
  EXPECT(more[0].source->pinned);
  unpin(more);
}

TEST(page_locking_counts_what_an_allocator_takes_for_small_copies) {
  struct Rounding final : Driver {
    Rounding() : Driver(/*locks=*/true) {}
    std::size_t taken(std::size_t bytes) const override { return 2 * bytes; }
  };
  Master small(8u << 10);
  Rounding device;
  PinnedCopies copies;
  std::vector<Lockable> items{small.lockable()};
  EXPECT_EQ(page_lock(device, copies, items), "");
  EXPECT_EQ(HostMemory::used()[static_cast<std::size_t>(HostUse::copies)], 2 * small.bytes);
  unpin(items);
}

TEST(page_locking_stages_a_master_whose_copy_is_not_told_of_writes_any_more) {
  Master master;
  std::optional<std::uint64_t> writes = 1;  // as a watch tells them, until it is lost
  auto copy = std::make_shared<PinnedCopy>();
  copy->bytes = {new std::byte[kBytes], std::default_delete<std::byte[]>()};
  copy->writes = [&] { return writes; };
  auto source = std::make_shared<Source>(*master.lockable().source);
  source->pinned = true;
  source->pinned_copy = copy;
  EXPECT(path_of(source).path == CopyPath::staged);
  EXPECT_EQ(path_of(source).byte, 1);
  writes.reset();
  EXPECT(path_of(source).path == CopyPath::staged);
  EXPECT(path_of(source).path == CopyPath::staged);
}

TEST(page_locking_says_why_a_large_master_has_no_copy) {
  Master watched;
  if (!watches_pages(watched)) return;
  Master mapped;
  Driver device(/*locks=*/false);
  std::vector<Lockable> items{mapped.lockable()};
  auto of_a_file = std::make_shared<Source>(*items[0].source);
  of_a_file->mapped = true;
  items[0].source = of_a_file;
  PinnedCopies copies;
  EXPECT(page_lock(device, copies, items).find("locks nothing, and they are mapped") != std::string::npos);
  std::vector<Lockable> over{watched.lockable()};
  const auto limit = HostMemory::limit({.beside_masters = kBytes / 2});
  EXPECT_EQ(page_lock(device, copies, over), "");  // the user named the amount
  EXPECT(!over[0].source->pinned);
}

}  // namespace
