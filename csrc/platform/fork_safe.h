// What threads share, made so that a forked child never waits for a thread that it does not have.
//
// Note [A forked child has one thread]
// It is the one that forked. All others are gone, in the middle of whatever they did, and the child has a
// copy of what they left behind. A mutex that one of them held is never unlocked. A condition that one of
// them waited on still counts it: destroying the condition waits for that waiter to leave, and so may a later
// notification or wait (glibc lets a new group of waiters begin after the last of the old one has left). A
// thread object that is joinable ends the process when it is destroyed, and to join it may never return.
//
// So nothing of this kind is used bare (tests/test_layers.py looks for it), but through the types below. They
// know in which process they were made. In another one they wait for nothing that they find:
// - A Mutex begins unlocked. It tells whether somebody held it, where that matters to what it guards: see
//   Mutex::take_interrupted().
// - A Condition belongs to the process that made it, as do the threads that would notify it. In a child it
//   does not wait, and tells so.
// - A Thread is not joined.
// - What a lock guards may be half changed. Where it owns memory, either a handler holds the lock over the
//   fork (Note [A fork waits for engines]), or it is a PerProcess, or it is left alone.
// What cannot be destroyed in a child is abandoned there: its memory is a copy, and goes with the child.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace dynswap {

namespace fork_detail {

inline std::atomic<unsigned> fork_count{0};
inline std::atomic<unsigned> child_count{0};

/// Held while a child replaces one of its parent's objects: one at a time.
class Renewal {
 public:
  Renewal() noexcept;
  ~Renewal();
  Renewal(const Renewal&) = delete;
  Renewal& operator=(const Renewal&) = delete;
};

}  // namespace fork_detail

/// How many forks lie between this process and the one that loaded this library. (To ask the kernel for the
/// process's id takes as long as a system call.)
inline unsigned forks() noexcept { return fork_detail::fork_count.load(std::memory_order_relaxed); }

/// How many children this process has forked, or is about to. What they share with it, such as the bytes of a
/// file, they find as it was then if nothing is written over after this has changed.
inline unsigned children() noexcept { return fork_detail::child_count.load(std::memory_order_relaxed); }

/// A T for each process: in a forked child it is a new one, default-constructed when it is first used, and
/// the parent's is not destroyed. Thread-safe, as far as T is.
template <class T>
class PerProcess {
 public:
  PerProcess() : value_(), made_after_(forks()) {}
  ~PerProcess() {
    if (here()) value_.~T();
  }
  PerProcess(const PerProcess&) = delete;
  PerProcess& operator=(const PerProcess&) = delete;

  /// Whether the object is one of this process.
  bool here() const noexcept { return made_after_.load(std::memory_order_acquire) == forks(); }

  T& get() {
    return get([](T&) {});
  }
  /// `look` is called with the parent's object before that is abandoned. It may use no other
  /// PerProcess: one object at a time is replaced, and a second would wait for the first.
  template <class Look>
  T& get(const Look& look) {
    if (!here()) renew(look);
    return value_;
  }
  T& operator*() { return get(); }
  T* operator->() { return &get(); }

 private:
  template <class Look>
  void renew(const Look& look) {
    const fork_detail::Renewal one_at_a_time;
    if (here()) return;
    look(value_);
    ::new (static_cast<void*>(std::addressof(value_))) T();
    made_after_.store(forks(), std::memory_order_release);
  }

  union {  // so that it is not destroyed by itself
    T value_;
  };
  std::atomic<unsigned> made_after_;  ///< so many forks
};

/// A std::mutex that a forked child can always take.
class Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() { native().lock(); }
  bool try_lock() { return native().try_lock(); }
  /// Unlocks the mutex; also in a child, if the forking thread held it over the fork. Until then no other
  /// thread of the child may ask for it: handlers unlock before the child has any.
  void unlock() {
    if (mutex_.here()) {
      mutex_->unlock();
    } else {
      static_cast<void>(mutex_.get([](std::mutex& of_parent) { of_parent.unlock(); }));
    }
  }

  /// True once in a forked child, if a thread held it at the fork: what it guards may be half changed.
  /// LOCK: the calling thread holds it.
  bool take_interrupted() noexcept { return std::exchange(interrupted_, false); }

 private:
  friend class Condition;
  std::mutex& native() {
    return mutex_.get([this](std::mutex& of_parent) {
      if (!of_parent.try_lock()) interrupted_ = true;  // nor does a child of this child forget it
    });
  }

  PerProcess<std::mutex> mutex_;
  bool interrupted_ = false;
};

/// A std::condition_variable that can be notified and destroyed in a forked child, and is not waited for
/// there: its threads are the parent's.
class Condition {
 public:
  /// Waits until `holds()`. False if it does not hold, and this is a child of the process that made the
  /// condition.
  template <class Predicate>
  [[nodiscard]] bool wait(std::unique_lock<Mutex>& lock, Predicate holds) {
    if (!changed_.here()) return holds();
    Native native(lock);
    changed_->wait(native.lock, std::move(holds));
    return true;
  }

  /// Waits until `holds()`, for `patience` at most. False if it does not hold by then, or does not hold and
  /// this is a child of the process that made the condition.
  template <class Rep, class Period, class Predicate>
  [[nodiscard]] bool wait_for(std::unique_lock<Mutex>& lock, std::chrono::duration<Rep, Period> patience,
                              Predicate holds) {
    if (!changed_.here()) return holds();
    Native native(lock);
    return changed_->wait_for(native.lock, patience, std::move(holds));
  }

  void notify_one() noexcept {
    if (changed_.here()) changed_->notify_one();
  }
  void notify_all() noexcept {
    if (changed_.here()) changed_->notify_all();
  }
  /// Whether threads of this process may wait for it.
  bool here() const noexcept { return changed_.here(); }

 private:
  /// A lock of ours as one of the standard library's, which leaves the mutex locked.
  struct Native {
    explicit Native(std::unique_lock<Mutex>& of) : lock(of.mutex()->native(), std::adopt_lock) {}
    ~Native() { lock.release(); }
    Native(const Native&) = delete;
    Native& operator=(const Native&) = delete;
    std::unique_lock<std::mutex> lock;
  };

  PerProcess<std::condition_variable> changed_;
};

/// A std::thread that a forked child does not join. Move-only.
class Thread {
 public:
  explicit Thread(std::thread thread) : thread_(std::make_unique<PerProcess<std::thread>>()) {
    **thread_ = std::move(thread);
  }

  void join() {
    if ((*thread_)->joinable()) (*thread_)->join();
  }

 private:
  std::unique_ptr<PerProcess<std::thread>> thread_;  ///< in a child: no thread
};

}  // namespace dynswap
