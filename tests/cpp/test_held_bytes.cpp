// Memory that is held beyond its storage, and given back as it was.
#include "core/held_bytes.h"

#include <memory>
#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace dynswap;

std::vector<std::string> done;  // in its order

void free_memory(void*) { done.push_back("freed"); }

HeldBytes::Context memory() {
  static int block;
  done.clear();
  return {&block, &free_memory};
}

std::shared_ptr<void> page_lock() {
  return {&done, [](void*) { done.push_back("unlocked"); }};
}

TEST(held_bytes_leave_no_trace) {
  HeldBytes::Context context = memory();
  void* const before = context.get();
  const auto first = HeldBytes::hold(context);
  const auto second = HeldBytes::hold(context);
  EXPECT(first == second && HeldBytes::of(context) == first);
  EXPECT(context.get_deleter() != &free_memory);
  first->leave(&context);
  EXPECT(HeldBytes::of(context) == first);
  second->leave(&context);
  EXPECT(context.get() == before && context.get_deleter() == &free_memory);
  EXPECT(HeldBytes::of(context) == nullptr);
  EXPECT(done.empty());
}

TEST(held_bytes_are_freed_after_their_last_reader) {
  HeldBytes::Context context = memory();
  auto reader = HeldBytes::hold(context);
  context.reset();
  EXPECT(done.empty());
  reader->leave(nullptr);
  EXPECT(done.empty());
  reader.reset();
  EXPECT_EQ(done.size(), 1u);
}

TEST(held_bytes_are_freed_with_their_storage_if_nobody_reads) {
  HeldBytes::Context context = memory();
  HeldBytes::hold(context).reset();
  EXPECT(done.empty());
  context.reset();
  EXPECT_EQ(done.size(), 1u);
}

TEST(held_bytes_are_unlocked_before_they_are_freed) {
  HeldBytes::Context context = memory();
  auto reader = HeldBytes::hold(context);
  EXPECT(reader->lock(&page_lock));
  EXPECT(reader->lock([]() -> std::shared_ptr<void> { return nullptr; }));  // it is locked
  reader->unlock();
  EXPECT(done.empty());
  context.reset();
  reader.reset();
  EXPECT_EQ(done.size(), 2u);
  EXPECT_EQ(done.front(), "unlocked");
}

TEST(held_bytes_refused_can_be_locked_later) {
  HeldBytes::Context context = memory();
  const auto held = HeldBytes::hold(context);
  EXPECT(!held->lock([]() -> std::shared_ptr<void> { return nullptr; }));
  EXPECT(held->lock(&page_lock));
  held->unlock();
  EXPECT_EQ(done.size(), 1u);
}

TEST(held_bytes_that_moved_to_another_storage_stay_there) {
  HeldBytes::Context context = memory();
  auto held = HeldBytes::hold(context);
  HeldBytes::Context elsewhere = std::exchange(context, memory());  // `share_memory()` swaps
  held->leave(&context);
  EXPECT(context.get_deleter() == &free_memory);
  held.reset();
  done.clear();
  elsewhere.reset();
  EXPECT_EQ(done.size(), 1u);
}

}  // namespace
