// What a forked child finds of the parent's threads: Note [A forked child has one thread].
#include "platform/fork_safe.h"

#include <unistd.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "check.h"
#include "forked_child.h"

namespace dynswap::test {

namespace {

/// Waits for a condition in a thread of the parent.
class Waiter {
 public:
  Waiter() : thread_([this] { wait(); }) { wait_until_others_sleep(); }
  ~Waiter() {
    {
      const std::lock_guard lock(mutex);
      over_ = true;
    }
    condition->notify_all();
    thread_.join();
  }

  Mutex mutex;
  std::unique_ptr<Condition> condition = std::make_unique<Condition>();

 private:
  void wait() {
    std::unique_lock lock(mutex);
    EXPECT(condition->wait(lock, [&] { return over_; }));
  }

  bool over_ = false;  ///< LOCK: mutex
  std::thread thread_;
};

}  // namespace

TEST(fork_safe_mutex_of_another_thread_is_free_in_the_child) {
  Mutex mutex;
  Barrier barrier;
  std::thread holder([&] {
    const std::lock_guard lock(mutex);
    barrier.stop_here();
  });
  barrier.wait_until_reached();
  EXPECT(in_a_forked_child([&] {
    {
      const std::lock_guard lock(mutex);
      if (!mutex.take_interrupted() || mutex.take_interrupted()) return false;
    }
    // In the child's own children it is an ordinary mutex.
    return in_a_forked_child([&] {
      const std::lock_guard lock(mutex);
      return !mutex.take_interrupted();
    });
  }));
  EXPECT(!mutex.try_lock());
  barrier.open();
  holder.join();
  const std::lock_guard lock(mutex);
  EXPECT(!mutex.take_interrupted());
}

TEST(fork_safe_mutex_held_over_the_fork_is_given_back_in_the_child) {
  Mutex mutex;
  mutex.lock();
  EXPECT(in_a_forked_child([&] {
    mutex.unlock();
    const std::unique_lock lock(mutex, std::try_to_lock);
    return lock.owns_lock() && !mutex.take_interrupted();
  }));
  mutex.unlock();
}

TEST(fork_safe_condition_with_a_waiter_is_destroyed_in_the_child) {
  Waiter waiter;
  EXPECT(in_a_forked_child([&] {
    waiter.condition.reset();
    return true;
  }));
}

#ifndef __SANITIZE_THREAD__  // which starts no thread in a child of a process that had several
TEST(fork_safe_condition_with_a_waiter_is_notified_in_the_child) {
  Waiter waiter;
  EXPECT(in_a_forked_child([&] {
    // Bare, the second notification waits until the thread that the first was for has left.
    waiter.condition->notify_all();
    std::thread another([&] {
      std::unique_lock lock(waiter.mutex);
      static_cast<void>(waiter.condition->wait_for(lock, std::chrono::seconds(60), [] { return false; }));
    });
    wait_until_others_sleep();
    waiter.condition->notify_one();
    waiter.condition->notify_all();
    another.join();
    return true;
  }));
}
#endif

TEST(fork_safe_condition_of_the_parent_is_not_waited_for) {
  Waiter waiter;
  EXPECT(waiter.condition->here());
  EXPECT(in_a_forked_child([&] {
    std::unique_lock lock(waiter.mutex);
    const bool held = waiter.condition->wait(lock, [] { return true; });
    const bool came = waiter.condition->wait(lock, [] { return false; });
    return held && !came && !waiter.condition->here() && lock.owns_lock() && !waiter.mutex.try_lock();
  }));
}

TEST(fork_safe_condition_of_the_child_is_one) {
  EXPECT(in_a_forked_child([] {
    Condition condition;
    Mutex mutex;
    std::unique_lock lock(mutex);
    return condition.here() && !condition.wait_for(lock, std::chrono::milliseconds(1), [] { return false; });
  }));
}

TEST(fork_safe_thread_is_neither_joined_nor_missed_in_the_child) {
  Barrier barrier;
  std::optional<Thread> joined(std::thread([&] { barrier.stop_here(); }));
  std::optional<Thread> dropped(std::thread([&] { barrier.stop_here(); }));
  barrier.wait_until_reached(2);
  EXPECT(in_a_forked_child([&] {
    joined->join();
    joined.reset();
    dropped.reset();
    return true;
  }));
  barrier.open();
  joined->join();
  dropped->join();
}

TEST(fork_safe_object_of_the_parent_is_another_in_the_child) {
  struct Counted {
    ~Counted() {
      if (destroyed != nullptr) ++*destroyed;
    }
    int value = 1;
    int* destroyed = nullptr;
  };
  int destroyed = 0;
  auto object = std::make_unique<PerProcess<Counted>>();
  **object = {2, &destroyed};
  destroyed = 0;  // that was the temporary
  EXPECT(object->here());
  EXPECT(in_a_forked_child([&] {
    if (object->here() || (*object)->value != 1 || !object->here()) return false;
    object.reset();
    return destroyed == 0;
  }));
  EXPECT(in_a_forked_child([&] {
    object.reset();  // without a use
    return destroyed == 0;
  }));
  EXPECT_EQ((*object)->value, 2);
  object.reset();
  EXPECT_EQ(destroyed, 1);
}

}  // namespace dynswap::test
