// Errors of the engine. Each carries the whole sentence that a person will read.
#pragma once

#include <cstddef>
#include <sstream>
#include <stdexcept>
#include <string>

namespace dynswap {

/// Base of every error that the engine raises.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The budget cannot hold what must be on the device at one time.
class BudgetError : public Error {
 public:
  BudgetError(const std::string& what, std::size_t smallest_bytes)
      : Error(what), smallest_bytes_(smallest_bytes) {}
  /// The smallest budget in bytes that would have worked.
  std::size_t smallest_bytes() const noexcept { return smallest_bytes_; }

 private:
  std::size_t smallest_bytes_;
};

/// The engine has been closed: its model was uninstalled, or another plan has taken its place.
class ClosedError : public Error {
 public:
  using Error::Error;
};

/// Device memory could not be allocated.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// A source could not be read: a file that is gone, truncated or changed, or a failing disk.
class SourceError : public Error {
 public:
  using Error::Error;
};

/// The device reported an error.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// The message where a forked child would need a thread of its parent (Note [A forked child has one thread]).
inline constexpr const char* kOnlyInParent =
    "a forked process does not have the copies of weights that its parent had begun: fork before the model "
    "is called, or start the process with the 'spawn' method";

}  // namespace dynswap

/// Throws dynswap::Error with the streamed message if `condition` does not hold.
#define DYNSWAP_CHECK(condition, message)                                                       \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      std::ostringstream dynswap_stream_;                                                       \
      dynswap_stream_ << message << " [" #condition ", " << __FILE__ << ':' << __LINE__ << ']'; \
      throw ::dynswap::Error(dynswap_stream_.str());                                            \
    }                                                                                           \
  } while (false)
