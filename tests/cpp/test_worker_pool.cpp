// io: WorkerPool.
#include "io/worker_pool.h"

#include <atomic>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "system.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

/// A pool with one thread that is kept busy, so that what is submitted stays queued.
class BusyPool {
 public:
  BusyPool() : pool(1) {
    std::promise<void> begun;
    pool.submit({[&begun, gate = gate_.get_future().share()] {
                   begun.set_value();
                   gate.wait();
                 },
                 {}});
    begun.get_future().wait();
  }
  void let_go() { gate_.set_value(); }

  /// A task that notes its name when it runs, and in lower case (a, b, ...) when it is cancelled.
  WorkerPool::Task note(char name, const void* tag = nullptr) {
    return {[this, name] { add(name); }, [this, name] { add(static_cast<char>(name - 'A' + 'a')); }, tag};
  }
  std::string noted() {
    const std::lock_guard lock(mutex_);
    return noted_;
  }
  /// Waits until what is queued now, and is not urgent, has run.
  void drain() {
    std::promise<void> done;
    pool.submit({[&] { done.set_value(); }, {}});
    done.get_future().wait();
  }

 private:
  void add(char name) {
    const std::lock_guard lock(mutex_);
    noted_ += name;
  }
  std::promise<void> gate_;
  std::mutex mutex_;
  std::string noted_;

 public:
  WorkerPool pool;
};

TEST(pool_runs_every_task) {
  WorkerPool pool(3);
  std::atomic<int> sum{0};
  std::atomic<int> left{8 * 500};
  std::promise<void> done;
  std::vector<std::thread> submitters;
  for (int t = 0; t < 8; ++t) {
    submitters.emplace_back([&] {
      for (int i = 1; i <= 500; ++i) {
        EXPECT(pool.submit({[&, i] {
                              sum += i;
                              if (--left == 0) done.set_value();
                            },
                            {}},
                           i % 3 == 0));
      }
    });
  }
  for (std::thread& thread : submitters) thread.join();
  done.get_future().wait();
  EXPECT_EQ(sum.load(), 8 * 500 * 501 / 2);
}

TEST(pool_urgent_tasks_go_first) {
  BusyPool busy;
  for (const char name : {'A', 'B'}) busy.pool.submit(busy.note(name));
  for (const char name : {'C', 'D'}) busy.pool.submit(busy.note(name), /*urgent=*/true);
  busy.let_go();
  busy.drain();
  EXPECT_EQ(busy.noted(), "CDAB");
}

TEST(pool_promotes_by_tag) {
  BusyPool busy;
  const int tag = 0;
  busy.pool.submit(busy.note('A'));
  busy.pool.submit(busy.note('B', &tag));
  busy.pool.submit(busy.note('C'));
  busy.pool.submit(busy.note('D', &tag));
  busy.pool.submit(busy.note('E'), /*urgent=*/true);
  busy.pool.promote(&tag);
  busy.let_go();
  busy.drain();
  EXPECT_EQ(busy.noted(), "EBDAC");
}

TEST(pool_close_finishes_what_runs_and_cancels_the_rest) {
  const std::size_t before = threads_of_this_process();
  {
    BusyPool busy;
    busy.pool.submit(busy.note('A'));
    busy.pool.submit(busy.note('B'), /*urgent=*/true);
    std::thread closer([&] { busy.pool.close(); });
    while (busy.noted() != "ba") std::this_thread::yield();  // cancelled while the first task still runs
    EXPECT(!busy.pool.submit(busy.note('C')));
    EXPECT_EQ(threads_of_this_process(), before + 2);
    busy.let_go();
    closer.join();
    EXPECT_EQ(threads_of_this_process(), before);
    busy.pool.close();
    EXPECT_EQ(busy.noted(), "ba");
  }
  EXPECT_THROWS(WorkerPool(0), Error);
}

}  // namespace
