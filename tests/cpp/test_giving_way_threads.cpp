// Threads on a device whose memory is short: one allocates, and residents give way to it, while others read
// weights, replace masters and make new plans. Run it under ThreadSanitizer; and without one protection at a
// time (DYNSWAP_MUTANTS), which has to show.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "core/protection.h"
#include "random.h"
#include "versioned_masters.h"

namespace dynswap::test {

namespace {

constexpr std::size_t kWeights = 24;
constexpr std::size_t kRoom = kWeights + 6;  // of the device, in weights
constexpr std::uint32_t kOthers = 0xEEEEEEEE;
constexpr auto kAWhile = std::chrono::microseconds(20);

/// Set while the calling thread lends residents, or takes them back.
thread_local bool busy = false;

/// Device memory as torch's allocator manages it (csrc/accelerator/giving_way.cpp): free blocks are kept, its
/// lock is held through a whole allocation, and residents are on loan until it is known what came of that.
class Allocator : public std::enable_shared_from_this<Allocator> {
 public:
  Memory allocate(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (Memory memory = kept(bytes)) return memory;
    if (busy) return fresh(bytes);
    busy = true;
    std::vector<std::pair<std::shared_ptr<Engine>, std::vector<Engine::Loan>>> lent = lend();
    std::this_thread::sleep_for(kAWhile);
    Memory memory;
    bool intact = true;
    try {
      memory = fresh(bytes);
    } catch (const OutOfMemory&) {
      intact = false;
      trim();
    }
    for (auto& [engine, loans] : lent) {
      if (intact) {
        engine->take_back(std::move(loans));
      } else {
        engine->give_up(loans);
      }
    }
    busy = false;
    return memory ? memory : fresh(bytes);
  }

  /// While it is registered, an engine's residents give way.
  void add(const std::shared_ptr<Engine>& engine) {
    const std::lock_guard lock(givers_mutex_);
    givers_.push_back(engine);
  }
  void remove(const std::shared_ptr<Engine>& engine) {
    const std::lock_guard lock(givers_mutex_);
    std::erase(givers_, engine);
  }
  std::size_t loans() const { return loans_; }

 private:
  using Block = std::shared_ptr<std::vector<std::uint32_t>>;

  std::vector<std::pair<std::shared_ptr<Engine>, std::vector<Engine::Loan>>> lend() {
    std::vector<std::pair<std::shared_ptr<Engine>, std::vector<Engine::Loan>>> lent;
    const std::lock_guard lock(givers_mutex_);
    for (const std::shared_ptr<Engine>& engine : givers_) {
      lent.emplace_back(engine, engine->lend_residents());
      loans_ += lent.back().second.size();
    }
    return lent;
  }

  /// Gives kept memory back to the driver, which lets others have it.
  void trim() {
    for (const auto& [bytes, block] : kept_) std::fill(block->begin(), block->end(), kOthers);
    kept_.clear();
    reserved_ = in_use_;
  }

  Memory kept(std::size_t bytes) {
    const auto found = kept_.find(bytes);
    if (found == kept_.end()) return nullptr;
    Block block = std::move(found->second);
    kept_.erase(found);
    return hand_out(std::move(block), bytes);
  }

  Memory fresh(std::size_t bytes) {
    if (reserved_ + bytes > kRoom * kWeightBytes) throw OutOfMemory("the device is full");
    reserved_ += bytes;
    // Never freed before the end: a thread that reads too late reads what is another's by then.
    all_.push_back(std::make_shared<std::vector<std::uint32_t>>(bytes / sizeof(std::uint32_t)));
    return hand_out(all_.back(), bytes);
  }

  Memory hand_out(Block block, std::size_t bytes) {
    in_use_ += bytes;
    auto* const data = reinterpret_cast<std::byte*>(block->data());
    return Memory(data, [self = shared_from_this(), block = std::move(block), bytes](std::byte*) {
      const std::lock_guard lock(self->mutex_);
      self->in_use_ -= bytes;
      self->kept_.emplace(bytes, block);
    });
  }

  std::recursive_mutex mutex_;
  // LOCK: mutex_ guards these. It comes before givers_mutex_, and that before the engine's.
  std::multimap<std::size_t, Block> kept_;
  std::vector<Block> all_;
  std::size_t reserved_ = 0;
  std::size_t in_use_ = 0;
  std::mutex givers_mutex_;
  std::vector<std::shared_ptr<Engine>> givers_;  ///< LOCK: givers_mutex_
  std::atomic<std::size_t> loans_{0};
};

/// Takes its memory from the allocator.
class Immediate final : public ImmediateBackend {
 public:
  explicit Immediate(std::shared_ptr<Allocator> allocator) : allocator_(std::move(allocator)) {}
  Memory allocate(std::size_t bytes) override { return allocator_->allocate(bytes); }
  bool release_after(const Memory&, const std::vector<EventPtr>&) noexcept override { return true; }

 private:
  const std::shared_ptr<Allocator> allocator_;
};

/// A model that is planned again all the time.
class Model {
 public:
  explicit Model(std::shared_ptr<Allocator> allocator) : allocator_(std::move(allocator)) {
    for (std::uint32_t weight = 0; weight < kWeights; ++weight)
      sources_.push_back(versioned_source(weight, 0));
  }
  ~Model() {
    if (engine_) allocator_->remove(engine_);
  }

  /// As Session::carry_out(): the old plan's memory goes before the new plan's is taken.
  void plan(std::size_t budget) {
    const std::lock_guard lock(masters_);
    EngineOptions options;
    options.group_bytes = 0;
    options.budget = budget;
    options.residents_give_way = true;
    const auto engine = std::make_shared<Engine>(std::make_unique<Immediate>(allocator_), options);
    std::vector<WeightId> ids;
    for (std::uint32_t i = 0; i < kWeights; ++i) ids.push_back(engine->add_weight(sources_[i], i));
    if (engine_) {
      engine->arrange(engine_->residents_on_device());
      engine->inherit(*engine_, {ids.begin(), ids.end()});
      engine_->close();
      given_way_ += engine_->stats().given_way;
      allocator_->remove(engine_);
    }
    try {
      engine->plan();
    } catch (const OutOfMemory&) {
      return;  // the closed one stays, until there is room
    }
    allocator_->add(engine);
    const std::lock_guard pointer(pointer_);
    engine_ = engine;
    ids_ = std::move(ids);
  }

  void replace(std::uint32_t weight, std::uint32_t version) {
    const std::lock_guard lock(masters_);
    sources_[weight] = versioned_source(weight, version);
    engine_->update_source(ids_[weight], sources_[weight]);
    versions_[weight].store(version);
  }

  /// Reads a weight through a lease, and once more before it lets go: all words of one version, at least as
  /// new as when it was asked for.
  void read(std::uint32_t weight, Stream stream, std::chrono::microseconds held) {
    std::shared_ptr<Engine> engine;
    WeightId id = 0;
    {
      const std::lock_guard lock(pointer_);
      engine = engine_;
      id = ids_[weight];
    }
    const std::uint32_t least = versions_[weight].load();
    try {
      const Lease lease = engine->acquire(id, stream);
      check(lease, weight, least);
      std::this_thread::sleep_for(held);
      check(lease, weight, least);
      ++reads_;
    } catch (const ClosedError&) {
      // there is a new plan
    } catch (const OutOfMemory&) {
      // everything else is held
    }
  }

  std::size_t given_way() const { return given_way_; }
  std::size_t wrong() const { return wrong_; }
  std::size_t reads() const { return reads_; }

 private:
  void check(const Lease& lease, std::uint32_t weight, std::uint32_t least) {
    if (!holds_version(lease, weight, least)) ++wrong_;
  }

  const std::shared_ptr<Allocator> allocator_;
  std::mutex masters_;              ///< one plan or one new master at a time
  std::vector<SourcePtr> sources_;  ///< LOCK: masters_
  std::mutex pointer_;
  std::shared_ptr<Engine> engine_;  ///< LOCK: pointer_, to read it without masters_ and to write it
  std::vector<WeightId> ids_;       ///< LOCK: as engine_
  std::array<std::atomic<std::uint32_t>, kWeights> versions_{};
  std::atomic<std::size_t> given_way_{0}, wrong_{0}, reads_{0};
};

/// Others' tensors: some are kept, and all are written.
void allocate(Allocator& allocator, std::size_t times) {
  Random random(7);
  std::vector<Memory> kept;
  for (std::size_t i = 0; i < times; ++i) {
    const std::size_t bytes = kWeightBytes * random.between(1, 12);
    try {
      kept.push_back(allocator.allocate(bytes));
      auto* const words = reinterpret_cast<std::uint32_t*>(kept.back().get());
      for (std::size_t word = 0; word < bytes / sizeof(std::uint32_t); ++word) words[word] = kOthers;
    } catch (const OutOfMemory&) {
      kept.clear();
    }
    if (!kept.empty() && random.chance(0.6)) kept.erase(kept.begin());
    std::this_thread::sleep_for(kAWhile);
  }
}

struct Outcome {
  std::size_t wrong, given_way, loans, reads;
};

Outcome run(std::size_t allocations) {
  const auto allocator = std::make_shared<Allocator>();
  Model model(allocator);
  model.plan(kWeights * kWeightBytes);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (Stream stream = 0; stream < 2; ++stream) {
    threads.emplace_back([&, stream] {
      Random random(stream + 1);
      while (!stop) {
        for (std::uint32_t weight = 0; weight < kWeights; ++weight)
          if (random.chance(0.9)) model.read(weight, stream, kAWhile * random.below(10));
      }
    });
  }
  threads.emplace_back([&] {
    Random random(99);
    while (!stop) {
      model.plan(kWeightBytes * random.between(4, kWeights));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  threads.emplace_back([&] {
    Random random(98);
    for (std::uint32_t version = 1; !stop; version = version % 0xffff + 1) {
      model.replace(static_cast<std::uint32_t>(random.below(kWeights)), version);
      std::this_thread::sleep_for(kAWhile);
    }
  });
  allocate(*allocator, allocations);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  return {model.wrong(), model.given_way(), allocator->loans(), model.reads()};
}

}  // namespace

#ifndef DYNSWAP_MUTANTS

TEST(giving_way_to_another_thread) {
  const Outcome outcome = run(1500);
  EXPECT_EQ(outcome.wrong, 0u);
  EXPECT(outcome.given_way > 0);
  EXPECT(outcome.loans > outcome.given_way);  // some were taken back
  EXPECT(outcome.reads > 0);
}

#else

TEST(protections_are_missed_by_threads) {
  for (const Protection protection : {Protection::lease_keeps_resident, Protection::changed_not_taken_back}) {
    removed_protection = protection;
    std::size_t wrong = 0;
    for (int round = 0; round < 100 && wrong == 0; ++round) wrong = run(500).wrong;  // on a busy machine
    removed_protection = Protection::none;
    EXPECT(wrong > 0);
  }
}

#endif

}  // namespace dynswap::test
