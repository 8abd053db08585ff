// Linux: a forked child, and threads of which it has none.
#pragma once

#include <dirent.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>

namespace dynswap::test {

/// Forks. Returns whether `body` returned true in the child, in the time that it has.
template <class Body>
bool in_a_forked_child(const Body& body) {
  constexpr unsigned kSeconds = 10;
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kSeconds);
    bool passed = false;
    try {
      passed = body();
    } catch (const std::exception&) {
    }
    ::_exit(passed ? 0 : 1);
  }
  int status = -1;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Waits until every other thread sleeps. What a thread waits for is known from what is not held: if no mutex
/// is, it has come to its condition.
inline void wait_until_others_sleep() {
  const std::string own = std::to_string(::syscall(SYS_gettid));
  const auto all_sleep = [&] {
    DIR* const tasks = ::opendir("/proc/self/task");
    bool sleep = true;
    while (const dirent* const task = ::readdir(tasks)) {
      if (task->d_name[0] == '.' || task->d_name == own) continue;
      std::ifstream io(std::string("/proc/self/task/") + task->d_name + "/stat");
      const std::string stat{std::istreambuf_iterator<char>(io), {}};
      const std::size_t name_end = stat.rfind(')');  // the state comes after the name, in brackets
      sleep = sleep && (name_end == std::string::npos || stat.substr(name_end + 2, 1) == "S");
    }
    ::closedir(tasks);
    return sleep;
  };
  for (int in_a_row = 0; in_a_row < 3; in_a_row = all_sleep() ? in_a_row + 1 : 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// Where threads of the parent stop until they may go on. The standard library's own types, as no child has
/// anything to do with it.
class Barrier {
 public:
  void stop_here() {
    std::unique_lock lock(mutex_);
    ++stopped_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  void wait_until_reached(int threads = 1) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ >= threads; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int stopped_ = 0;
  bool open_ = false;
};

}  // namespace dynswap::test
