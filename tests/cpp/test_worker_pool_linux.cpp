// io: the threads of WorkerPool, and signals.
#include <pthread.h>
#include <signal.h>

#include <future>
#include <string>

#include "check.h"
#include "io/worker_pool.h"

namespace {

using namespace dynswap;

TEST(pool_threads_leave_signals_to_others) {
  WorkerPool pool(1);
  std::promise<void> done;
  pool.submit({[&] {
                 char name[16] = {};
                 pthread_getname_np(pthread_self(), name, sizeof(name));
                 EXPECT_EQ(std::string(name), "dynswap-io");
                 sigset_t blocked;
                 pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
                 for (const int signal : {SIGINT, SIGTERM, SIGCHLD, SIGUSR1})
                   EXPECT(sigismember(&blocked, signal));
                 done.set_value();
               },
               {}});
  done.get_future().wait();
  sigset_t here;
  pthread_sigmask(SIG_SETMASK, nullptr, &here);
  EXPECT(!sigismember(&here, SIGINT));
}

}  // namespace
