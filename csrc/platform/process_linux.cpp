#include "platform/process.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace dynswap {

namespace {

/// New threads inherit the signal mask of the one that makes them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::uint64_t thread_id() noexcept { return static_cast<std::uint64_t>(pthread_self()); }

Thread start_thread(const char* name, std::function<void()> run) {
  const SignalsBlocked blocked;
  return Thread(std::thread([name, run = std::move(run)] {
    pthread_setname_np(pthread_self(), name);
    run();
  }));
}

bool at_fork(void (*before)(), void (*in_parent)(), void (*in_child)()) noexcept {
  return pthread_atfork(before, in_parent, in_child) == 0;
}

void* loaded_function(const char* name) noexcept { return dlsym(RTLD_DEFAULT, name); }

void* loaded_function(const char* name, const char* library) noexcept {
  void* const loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (loaded == nullptr) return nullptr;
  void* const found = dlsym(loaded, name);
  dlclose(loaded);
  return found;
}

}  // namespace dynswap
