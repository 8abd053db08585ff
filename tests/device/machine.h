// A pretend machine with accelerators: memory that the host cannot touch, streams, events, pinned memory.
//
// One thread, the device's, runs what streams hold, in the order that streams and events declare, and as
// early or as late as that order allows: Note [Crueller than a GPU]. Two faces stand on it: the CUDA runtime
// (runtime*.cpp), which csrc/cuda links, and torch's device (torch_*.cpp), of type CUDA or PrivateUse1.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace pretend {

using Work = std::function<void()>;

/// Note [Crueller than a GPU]
///   1. Device addresses cannot be read or written by the host: a reserved range without access. The bytes
///      lie at hidden(address).
///   2. `late`: nothing runs before somebody waits for it, or the host has done nothing for a while (a
///      staged copy may be what it waits for). `early`: whatever may run does, beside the host. `mixed`: each
///      stream draws, again and again, from the seed.
///   3. Freed memory is poisoned, in the order of the stream that it was allocated for.
///   4. Copies from pinned memory read it when they run. What a copy to pinned memory will overwrite is
///      poisoned when the copy is asked for.
///   5. There are two devices. Mixing them is an error.
///   6. Synchronisations are counted, and an error while they are forbidden.
enum class Order { late, early, mixed };

constexpr int kDevices = 2;
constexpr unsigned char kPoison = 0xFF;  ///< NaN, -1, an index out of range

/// A point on a stream, which an event or a waiting host refers to.
struct Point;
using PointPtr = std::shared_ptr<Point>;

struct Stream;

/// Thrown for what the real runtime answers with an error. `code` is a cudaError_t.
struct DeviceFault : std::exception {
  DeviceFault(int error, std::string message) : code(error), text(std::move(message)) {}
  const char* what() const noexcept override { return text.c_str(); }
  int code;
  std::string text;
};

// --------------------------------------------------------------------------------------------- threads

/// The calling thread's contexts, the current one last: torch sets the device, csrc/cuda pushes.
std::vector<int>& contexts() noexcept;
int current_device() noexcept;
void set_device(int device) noexcept;

/// Called on the device's thread before anything else runs there.
void set_thread_setup(Work setup);

// ---------------------------------------------------------------------------------------------- order

/// Waits until all is done, and begins again with this seed: order, forbidden synchronisations, errors,
/// faults, and the virtual clock.
void reset(std::uint64_t seed, Order order);

/// The host has called something: it is not idle.
void note_call() noexcept;

// --------------------------------------------------------------------------------------------- memory

/// Where the bytes behind a device address are. Null if it is none.
std::byte* hidden(const void* address) noexcept;
/// The device of an address, -1 if it is the host's.
int device_of(const void* address) noexcept;
/// Device addresses, aligned to 512 bytes; null if the range is used up. Counts against no cap.
void* reserve(int device, std::size_t bytes);
/// Nobody uses them, nor does any queued work. The memory is the system's again.
void release(int device, void* address, std::size_t bytes);
/// Enqueues the poisoning of memory that was freed.
void poison(Stream& stream, void* address, std::size_t bytes);

// -------------------------------------------------------------------------------------------- streams

Stream& default_stream(int device);
Stream& make_stream(int device, int priority);
/// What is queued still runs.
void destroy(Stream& stream);
int device_of(const Stream& stream) noexcept;
int priority_of(const Stream& stream) noexcept;

/// Queues work that touches device memory through hidden(). It must not need the GIL, nor call this library.
/// A copy says how much it moves, for the virtual clock.
void enqueue(Stream& stream, Work work, const char* what, std::size_t copied_bytes = 0);
/// Queues a call into the host, in which no CUDA call is allowed.
void enqueue_host_function(Stream& stream, Work work);
/// Nothing later on this stream runs for that long.
void enqueue_delay(Stream& stream, std::chrono::nanoseconds delay);
bool idle(Stream& stream);

/// The numbers below `count` in an order drawn from the seed: that of the copies of a batch, which have none.
std::vector<std::size_t> any_order(std::size_t count);
/// Copies between any two places. `pageable` sources are read at once, and `pageable` targets waited for.
/// Throws DeviceFault (cudaErrorInvalidValue) for host memory that is pinned in part.
void copy(Stream& stream, void* to, const void* from, std::size_t bytes);

PointPtr record(Stream& stream);
void wait(Stream& stream, const PointPtr& point);
bool reached(const PointPtr& point);
/// Makes the host wait. `who` is counted, and named where it is forbidden.
void synchronise(const PointPtr& point, const char* who);
/// Throws where synchronise() would because it is forbidden. For what queues work before it waits for it:
/// that work must not be left behind.
void refuse_if_forbidden(const char* who);
void synchronise(Stream& stream, const char* who);
void synchronise_device(int device, const char* who);
/// When it was reached; only if it was.
std::chrono::steady_clock::time_point time_of(const PointPtr& point);

// ------------------------------------------------------------------------------------------- capturing

/// What is enqueued on the stream, and on those that come to wait for it, is kept instead of run.
using Graph = std::vector<std::pair<Work, const char*>>;
void begin_capture(Stream& stream, bool global);
std::shared_ptr<Graph> end_capture(Stream& stream);
bool capturing(const Stream& stream) noexcept;
/// The calling thread's capture mode is the relaxed one: it may make any call during captures.
bool& relaxed() noexcept;
/// Somebody captures in global mode: then calls that could synchronise are errors, and spoil the capture, but
/// for those of a relaxed thread.
bool capture_forbids(const char* who);
/// Somebody captures, in whatever mode: then what waits for the whole device is an error, for relaxed threads
/// too.
bool capture_forbids_all(const char* who);
/// Somebody captures, in whatever mode.
bool capture_under_way();
void replay(Stream& stream, const Graph& graph);

// ----------------------------------------------------------------------------------------------- host

enum class Pinned { no, whole, torn };
Pinned pinned(const void* address, std::size_t bytes);
/// First byte and number of bytes of the registration or allocation that holds an address; none: {0, 0}.
std::pair<std::uintptr_t, std::size_t> pinned_range(const void* address);
/// Pages that hold [address, address + bytes). A cudaError_t.
int pin(void* address, std::size_t bytes);
int unpin(void* address);
/// Pinned memory of our own. Given back when the copies that use it are over.
void* allocate_pinned(std::size_t bytes);
void free_pinned(void* address, std::vector<PointPtr> users = {});

// -------------------------------------------------------------------------------------------- watching

struct Counts {
  std::uint64_t copies = 0;           ///< host to device
  std::uint64_t copied_bytes = 0;     ///< host to device
  std::uint64_t pageable_copies = 0;  ///< of them, from pageable memory
  std::uint64_t batches = 0;
  std::uint64_t kernels = 0;
  std::uint64_t host_functions = 0;
  std::uint64_t synchronisations = 0;
  std::uint64_t registered_bytes = 0;
  std::uint64_t streams = 0;
  std::uint64_t events = 0;        ///< alive
  std::uint64_t timed_events = 0;  ///< ever made
  std::uint64_t contexts = 0;
  std::uint64_t longest_queue = 0;  ///< entries that one stream held at a time
};
Counts counts();
void count(std::uint64_t Counts::* what, std::int64_t more = 1);

struct Faults {
  bool no_batches = false;                          ///< a driver before 12.8
  std::uint64_t fail_copy = 0;                      ///< the copy of this number (from 1) is refused
  std::uint64_t fail_host_function = 0;             ///< likewise
  bool no_devices = false;                          ///< a driver that finds none
  int device_count_error = 0;                       ///< the cudaError_t of cudaGetDeviceCount(), not torch's
  int driver_version = 13000;                       ///< as cudaDriverGetVersion() answers
  std::size_t register_at_most = SIZE_MAX;          ///< bytes that may be page-locked in all
  std::size_t locked_at_most = SIZE_MAX;            ///< the same, and allocated page-locked: as WSL
  bool locks_bytes = false;                         ///< in place, and not all of their pages
  bool no_host_memory = false;                      ///< none is allocated page-locked
  int query_error = 0;                              ///< the cudaError_t that event queries answer with
  int kernel_error = 0;                             ///< the cudaError_t that whoever needs a kernel gets
  int registration_ms = 0;                          ///< how long one registration takes
  bool unpinning_waits = true;                      ///< for all devices, as CUDA does and promises nowhere
  std::size_t memory_bytes = std::size_t{8} << 30;  ///< bytes of each device
  std::size_t taken_by_others = 0;                  ///< of these, by other processes
  bool integrated = false;                          ///< the device computes in the host's own memory
  std::size_t segment_bytes = 0;                    ///< see Note [Segments]; 0: each block is one
  // What torch on some accelerators has not.
  bool no_priorities = false;       ///< streams have none: what is asked for is ignored
  bool no_pinned_memory = false;    ///< no host memory is pinned, and none can be allocated
  bool one_stream = false;          ///< the default one
  bool no_default_stream = false;   ///< as torch's guard for Intel's GPUs, which knows of none
  bool synchronous_copies = false;  ///< `non_blocking` is ignored
};
Faults& faults();

/// Note [The virtual clock]
/// Events then tell simulated time: a copy from or to the host takes its bytes at this speed, a delay takes
/// what was asked for, and everything else takes nothing. Work begins when its stream is free, what it waits
/// for is over, and the host has asked for it. The host takes no time except to wait. Work may run earlier in
/// real time, but an event is done only once the host's clock has reached it. 0: real time, again.
void set_virtual_clock(double bytes_per_second);

/// Note [A machine that does nothing]
/// To time the host alone: while true, what streams are given is counted and dropped. A point counts as
/// reached once `under_way` later ones have been recorded, or when it is waited for.
void drop_work(bool drop, std::size_t under_way);

/// While true, a synchronisation is a violation and throws.
void forbid_synchronisation(bool forbid);
bool synchronisation_forbidden();

/// While true, registered pages that were unmapped are a violation when they are unregistered. Slow.
void watch_pages(bool watch);

/// What no GPU forgives, and what was asked to be noted.
void violate(const std::string& what);
std::vector<std::string> violations();
/// An error of queued work, which every later call reports; empty if there is none.
std::string sticky_error();
bool on_device_thread() noexcept;

}  // namespace pretend
