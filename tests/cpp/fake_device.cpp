#include "fake_device.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>
#include <utility>

#include "core/check.h"

namespace dynswap::test {

namespace {

// What memory holds that no weight does. (The patterns of random_model.cpp avoid none of them: one byte may
// look right by chance, a whole weight does not.)
constexpr std::byte kFresh{0xCD};     // allocated, never written
constexpr std::byte kTransfer{0xA5};  // a copy is under way
constexpr std::byte kFreed{0xDD};

constexpr std::size_t kMostViolations = 8;
constexpr std::uint64_t kMostLatency = 40;  // ticks

bool is_done(const EventPtr& event) { return !event || event->done(); }

const char* describe(std::byte found) {
  if (found == kFresh) return "memory that was never written";
  if (found == kTransfer) return "a copy under way";
  if (found == kFreed) return "freed memory";
  return "other bytes";
}

}  // namespace

struct FakeDevice::Mark final : Event {
  bool done() const noexcept override { return is_done.load(std::memory_order_acquire); }
  std::atomic<bool> is_done{false};
  // Under the device's lock.
  bool awaited = false;  ///< a consumer has been made to wait for it
  std::string failure;   ///< of the copy; empty: none
};

struct FakeDevice::Block {
  explicit Block(std::size_t size, std::size_t alignment) : raw(size + alignment, kFresh), bytes(size) {
    const auto address = reinterpret_cast<std::uintptr_t>(raw.data());
    base = raw.data() + (alignment - address % alignment) % alignment;
  }
  std::vector<std::byte> raw;
  std::byte* base;
  std::size_t bytes;
  std::size_t uses = 0;           ///< operations that are still queued
  std::vector<EventPtr> after{};  ///< its next user comes after these
  std::optional<std::vector<EventPtr>> let_go_after{};
};

struct FakeDevice::Client {
  bool closed = false;  ///< LOCK: the device's
};

struct FakeDevice::Copy {
  std::shared_ptr<const Client> client;
  std::shared_ptr<Mark> mark = std::make_shared<Mark>();
  std::size_t parts_left = 0;
  bool begun = false;
};

struct FakeDevice::Part {
  std::shared_ptr<Copy> copy;
  std::vector<EventPtr> after;
  std::vector<Piece> pieces;
  std::vector<std::shared_ptr<Block>> blocks;  ///< one a piece; null: the piece was refused
  bool begun = false;
  bool over = false;
  std::uint64_t latency = 0;
  std::uint64_t not_before = 0;
};

struct FakeDevice::Op {
  // One of: wait for `event`; complete `mark`; write to the host; check `expected` at `data`.
  EventPtr event;
  std::shared_ptr<Mark> mark;
  std::shared_ptr<Block> block;
  const std::byte* data = nullptr;
  Expected expected;
  std::string what;
  bool last = false;  ///< the kernel's end
  std::function<void()> host_write{};
};

class FakeDevice::Adapter final : public Backend {
 public:
  explicit Adapter(std::shared_ptr<FakeDevice> device) : device_(std::move(device)) {}
  const char* name() const noexcept override { return "fake"; }
  const DeviceTraits& traits() const noexcept override { return device_->traits_; }
  Memory allocate(std::size_t bytes) override { return device_->allocate(bytes); }
  bool release_after(const Memory& memory, const std::vector<EventPtr>& after) noexcept override {
    return device_->release_after(memory, after);
  }
  EventPtr copy(CopyRequest request) override { return device_->copy(client_, std::move(request)); }
  void wait(Stream consumer, const EventPtr& copied) override { device_->wait(consumer, copied); }
  EventPtr record(Stream consumer) override { return device_->record(consumer); }
  void close() noexcept override { device_->close(client_); }
  void synchronise(const EventPtr& event) noexcept override { device_->synchronise(event); }
  std::uint64_t host_synchronisations() const noexcept override { return device_->host_synchronisations_; }

 private:
  const std::shared_ptr<FakeDevice> device_;
  const std::shared_ptr<Client> client_ = std::make_shared<Client>();
};

// -------------------------------------------------------------------------------------------- for tests

FakeDevice::FakeDevice(std::uint64_t seed, std::size_t alignment) : traits_{alignment, 64}, random_(seed) {
  fickle_ = random_.chance(0.5);
  change_mood();
}

FakeDevice::~FakeDevice() = default;

std::unique_ptr<Backend> FakeDevice::backend() { return std::make_unique<Adapter>(shared_from_this()); }

void FakeDevice::kernel(Stream stream, const std::byte* data, Expected expected, const std::string& what) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Block> block = use(data, expected->size(), what);
  if (!block) return;
  for (const bool last : {false, true}) {
    streams_[stream].push_back({nullptr, nullptr, block, data, expected, what, last});
  }
  tick();
}

void FakeDevice::host_write(Stream stream, std::byte* to, std::size_t bytes, std::byte value) {
  const std::lock_guard lock(mutex_);
  Op op;
  op.host_write = [=] { std::memset(to, static_cast<int>(value), bytes); };
  streams_[stream].push_back(std::move(op));
  tick();
}

void FakeDevice::drain() {
  const std::lock_guard lock(mutex_);
  hurry_ = true;
  while (run_one()) {
  }
  hurry_ = false;
  std::size_t stuck = parts_.size();
  for (const auto& [stream, queue] : streams_) stuck += queue.size();
  if (stuck > 0) note("deadlock: " + std::to_string(stuck) + " operations can never run");
}

void FakeDevice::set_cap(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  cap_ = bytes;
}

void FakeDevice::set_failures(unsigned copies, unsigned allocations) {
  const std::lock_guard lock(mutex_);
  failing_copies_ = copies;
  failing_allocations_ = allocations;
}

std::size_t FakeDevice::live_bytes() const {
  const std::lock_guard lock(mutex_);
  return live_;
}

std::size_t FakeDevice::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

std::vector<std::string> FakeDevice::violations() const {
  const std::lock_guard lock(mutex_);
  return violations_;
}

void FakeDevice::violation(const std::string& what) {
  const std::lock_guard lock(mutex_);
  note(what);
}

void FakeDevice::note(const std::string& violation) {
  if (violations_.size() < kMostViolations) violations_.push_back(violation);
}

// ------------------------------------------------------------------------------------------ the backend

Memory FakeDevice::allocate(std::size_t bytes) {
  interlope(Call::allocate);
  const std::lock_guard lock(mutex_);
  if (random_.below(1000) < failing_allocations_) throw OutOfMemory("the fake device is full, for once");
  if (live_ + bytes > cap_) {
    note("over the cap: " + std::to_string(live_ + bytes) + " bytes of " + std::to_string(cap_));
    throw OutOfMemory("the fake device is full");
  }
  const auto again = std::find_if(cache_.begin(), cache_.end(),
                                  [bytes](const auto& block) { return block->bytes == bytes; });
  auto block = again != cache_.end() ? *again : std::make_shared<Block>(bytes, traits_.alignment);
  if (again != cache_.end()) cache_.erase(again);
  std::byte* base = block->base;
  blocks_.emplace(base, std::move(block));
  live_ += bytes;
  ++allocations_;
  peak_ = std::max(peak_, live_);
  return Memory(base, [self = shared_from_this()](std::byte* memory) { self->free(memory); });
}

bool FakeDevice::release_after(const Memory& memory, const std::vector<EventPtr>& after) {
  const std::lock_guard lock(mutex_);
  if (!caching_) return false;
  if (!memory) return true;
  std::optional<std::vector<EventPtr>>& known = blocks_.at(memory.get())->let_go_after;  // of another owner
  if (!known) known.emplace();
  known->insert(known->end(), after.begin(), after.end());
  return true;
}

void FakeDevice::set_caching() {
  const std::lock_guard lock(mutex_);
  caching_ = true;
}

std::size_t FakeDevice::allocations() const {
  const std::lock_guard lock(mutex_);
  return allocations_;
}

void FakeDevice::empty_cache() {
  const std::lock_guard lock(mutex_);
  for (std::shared_ptr<Block>& block : cache_) {
    for (const EventPtr& event : block->after) {
      if (!is_done(event) && !run_until(event)) note("memory is let go after an event that can never be");
    }
    if (block->uses > 0) note("device memory was lent while it was used");
    std::fill(block->raw.begin(), block->raw.end(), kFreed);
    quarantine_.push_back(std::move(block));
  }
  cache_.clear();
}

void FakeDevice::free(const std::byte* base) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(base);
  std::shared_ptr<Block> block = found->second;
  // What is handed out a second time may still have readers of the first time.
  if (block->let_go_after || !block->after.empty()) {
    const std::vector<EventPtr> after =
        std::exchange(block->let_go_after, {}).value_or(std::vector<EventPtr>());
    block->after.insert(block->after.end(), after.begin(), after.end());
    live_ -= block->bytes;
    blocks_.erase(found);
    cache_.push_back(std::move(block));
    return;
  }
  if (block->uses > 0) {
    note("device memory freed while " + std::to_string(block->uses) + " queued operations use it");
  }
  std::fill(block->raw.begin(), block->raw.end(), kFreed);
  live_ -= block->bytes;
  blocks_.erase(found);
  quarantine_.push_back(std::move(block));
}

EventPtr FakeDevice::copy(const std::shared_ptr<Client>& client, CopyRequest request) {
  interlope(Call::copy);
  const std::lock_guard lock(mutex_);
  if (client->closed) throw DeviceError("the device is closed");
  const bool fails = random_.below(1000) < failing_copies_;
  if (fails && random_.chance(0.3)) throw SourceError("a read that could not be begun");
  const auto copy = std::make_shared<Copy>();
  copy->client = client;
  if (fails) copy->mark->failure = "a read that failed";
  for (Step& step : request.steps) {
    auto part = std::make_unique<Part>();
    part->copy = copy;
    part->after = std::move(step.after);
    part->pieces = std::move(step.pieces);
    for (const Piece& piece : part->pieces) {
      if (piece.first + piece.count > piece.source->count) note("a piece beyond its source");
      part->blocks.push_back(use(piece.dst, piece.count * scalar_size(piece.source->wanted), "a copy"));
      if (const auto& block = part->blocks.back())
        part->after.insert(part->after.end(), block->after.begin(), block->after.end());
    }
    if (random_.chance(0.5)) part->latency = random_.below(kMostLatency);
    ++copy->parts_left;
    parts_.push_back(std::move(part));
  }
  if (copy->parts_left == 0) note("a copy without a step");
  tick();
  return copy->mark;
}

void FakeDevice::wait(Stream consumer, const EventPtr& copied) {
  interlope(Call::wait);
  if (!copied) return;
  const std::lock_guard lock(mutex_);
  Mark& mark = static_cast<Mark&>(*copied);
  mark.awaited = true;
  if (!mark.failure.empty()) throw SourceError(mark.failure);
  streams_[consumer].push_back({copied, nullptr, nullptr, nullptr, nullptr, "", false});
  tick();
}

EventPtr FakeDevice::record(Stream consumer) {
  interlope(Call::record);
  const std::lock_guard lock(mutex_);
  std::deque<Op>& stream = streams_[consumer];
  if (stream.empty() && random_.chance(0.5)) return nullptr;
  const auto mark = std::make_shared<Mark>();
  stream.push_back({nullptr, mark, nullptr, nullptr, nullptr, "", false});
  tick();
  return mark;
}

void FakeDevice::close(const std::shared_ptr<Client>& client) {
  const std::lock_guard lock(mutex_);
  if (client->closed) note("closed twice");
  client->closed = true;
  std::vector<EventPtr> pending;
  for (const auto& part : parts_) {
    Copy& copy = *part->copy;
    if (copy.client != client) continue;
    if (copy.begun || copy.mark->awaited) {
      pending.push_back(copy.mark);
    } else if (copy.mark->failure.empty()) {
      copy.mark->failure = "dropped: the device was closed";
    }
  }
  for (const EventPtr& event : pending) {
    if (!run_until(event)) note("a copy that can never end, at close");
  }
}

void FakeDevice::synchronise(const EventPtr& event) {
  const std::lock_guard lock(mutex_);
  if (is_done(event)) return;
  ++host_synchronisations_;
  if (!run_until(event)) note("the host waits for an event that can never be");
}

// ---------------------------------------------------------------------------------------- the scheduler

std::shared_ptr<FakeDevice::Block> FakeDevice::use(const std::byte* data, std::size_t bytes,
                                                   const std::string& what) {
  auto next = blocks_.upper_bound(data);
  if (next != blocks_.begin()) {
    const std::shared_ptr<Block>& block = std::prev(next)->second;
    if (data + bytes <= block->base + block->bytes) {
      ++block->uses;
      return block;
    }
  }
  note(what + ": not in memory that is allocated");
  return nullptr;
}

void FakeDevice::change_mood() {
  constexpr double kReluctant[] = {0, 0.05, 0.3};
  const double reluctant = kReluctant[random_.below(3)];
  switch (random_.below(5)) {
    case 0:  // copies as early as may be: they overwrite what is still to be read
      copy_rate_ = 1;
      stream_rate_ = reluctant;
      break;
    case 1:  // copies as late as may be: they are not there when they are read
      copy_rate_ = reluctant;
      stream_rate_ = 1;
      break;
    case 2:
      copy_rate_ = stream_rate_ = reluctant;
      break;
    default:
      copy_rate_ = random_.unit();
      stream_rate_ = random_.unit();
  }
}

void FakeDevice::tick() {
  ++now_;
  if (fickle_ && random_.chance(0.02)) change_mood();
  for (bool ran = true; ran;) {
    ran = random_.chance(stream_rate_) && run_stream_op();
    ran = (random_.chance(copy_rate_) && run_copy_part()) || ran;
  }
}

bool FakeDevice::run_one() {
  const double both = copy_rate_ + stream_rate_;
  const bool copies_first = random_.chance(both > 0 ? copy_rate_ / both : 0.5);
  return copies_first ? run_copy_part() || run_stream_op() : run_stream_op() || run_copy_part();
}

bool FakeDevice::run_until(const EventPtr& event) {
  hurry_ = true;
  while (!is_done(event) && run_one()) {
  }
  hurry_ = false;
  return is_done(event);
}

bool FakeDevice::run_stream_op() {
  if (streams_.empty()) return false;
  const std::size_t n = streams_.size();
  auto it = std::next(streams_.begin(), static_cast<std::ptrdiff_t>(random_.below(n)));
  for (std::size_t i = 0; i < n; ++i, ++it) {
    if (it == streams_.end()) it = streams_.begin();
    if (it->second.empty() || !run(it->second.front())) continue;
    it->second.pop_front();
    return true;
  }
  return false;
}

bool FakeDevice::run(Op& op) {
  if (op.event) return op.event->done();
  if (op.mark) {
    op.mark->is_done.store(true, std::memory_order_release);
    return true;
  }
  if (op.host_write) {
    op.host_write();
    return true;
  }
  const std::vector<std::byte>& expected = *op.expected;
  if (std::memcmp(op.data, expected.data(), expected.size()) != 0) {
    const auto wrong = std::mismatch(expected.begin(), expected.end(), op.data);
    std::ostringstream message;
    message << op.what << ": byte " << wrong.first - expected.begin() << " of " << expected.size()
            << " is wrong when the kernel " << (op.last ? "ends: " : "begins: ") << describe(*wrong.second);
    note(message.str());
  }
  if (op.last) --op.block->uses;
  return true;
}

bool FakeDevice::run_copy_part() {
  const std::size_t n = parts_.size();
  if (n == 0) return false;
  const std::size_t first = random_.below(n);
  for (std::size_t i = 0; i < n; ++i) {
    std::unique_ptr<Part>& part = parts_[(first + i) % n];
    if (!run(*part)) continue;
    if (part->over) {
      std::swap(part, parts_.back());
      parts_.pop_back();
    }
    return true;
  }
  return false;
}

bool FakeDevice::run(Part& part) {
  Copy& copy = *part.copy;
  if (!part.begun) {
    while (!part.after.empty() && is_done(part.after.back())) part.after.pop_back();
    if (!part.after.empty()) return false;
    part.begun = true;
    part.not_before = now_ + part.latency;
    // One that was dropped at close() touches nothing; one that fails leaves half a transfer.
    const bool dropped = copy.client->closed && !copy.begun && !copy.mark->failure.empty();
    if (!dropped) copy.begun = true;
    for (std::size_t i = 0; i < part.pieces.size() && !dropped; ++i) {
      const Piece& piece = part.pieces[i];
      const std::size_t bytes = piece.count * scalar_size(piece.source->wanted);
      if (part.blocks[i]) std::fill_n(piece.dst, bytes, kTransfer);
    }
    return true;
  }
  if (!hurry_ && now_ < part.not_before) return false;
  for (std::size_t i = 0; i < part.pieces.size(); ++i) {
    if (!part.blocks[i]) continue;
    const Piece& piece = part.pieces[i];
    const std::size_t element = scalar_size(piece.source->wanted);
    if (copy.mark->failure.empty()) {
      std::memcpy(piece.dst, piece.source->address + piece.first * element, piece.count * element);
    }
    --part.blocks[i]->uses;
  }
  part.pieces.clear();
  part.over = true;
  if (--copy.parts_left == 0) copy.mark->is_done.store(true, std::memory_order_release);
  return true;
}

}  // namespace dynswap::test
