// An install on ranks that are threads, and a model of which all know the masters.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/check.h"
#include "core/engine.h"
#include "fake_ranks.h"
#include "host/host_backend.h"
#include "mesh/gathered_copies.h"
#include "random.h"

namespace dynswap::test {

using std::chrono::milliseconds;
using Master = std::shared_ptr<const std::vector<std::uint64_t>>;

inline constexpr milliseconds kNever{60000};  // no test comes to it

/// A word of a master: the group's number comes first in its upper half, which FakeGroup looks at.
inline std::uint64_t word_of(std::size_t group, std::size_t at) {
  return (group + 1) << 32 | (at & 0xffffffffu);
}

/// What all ranks know: the masters of each group, one copy of them for all.
struct Model {
  /// Of groups that have so many words; each in one to three weights.
  Model(const std::vector<std::size_t>& words, Random random) {
    for (std::size_t group = 0; group < words.size(); ++group) {
      std::vector<Master>& weights = groups.emplace_back();
      std::size_t done = 0;
      for (std::size_t left = random.between(1, 3); left > 0; --left) {
        const std::size_t some = left == 1 ? words[group] - done : words[group] / 4 / 64 * 64;
        auto master = std::make_shared<std::vector<std::uint64_t>>(some);
        for (std::uint64_t& word : *master) word = word_of(group, done++);
        weights.push_back(std::move(master));
      }
      bytes += words[group] * 8;
    }
  }
  std::vector<std::vector<Master>> groups;
  std::uint64_t bytes = 0;
};

inline Model even_model(std::size_t groups) {
  return {std::vector<std::size_t>(groups, 32u << 10), Random(1)};
}

inline std::string name_of(std::size_t group, std::size_t weight) {
  return "group " + std::to_string(group) + ", weight " + std::to_string(weight);
}

/// The first weight of each group goes through cast().
inline std::shared_ptr<Source> source_of(const Master& master, std::string name, bool first) {
  auto source = std::make_shared<Source>();
  source->name = std::move(name);
  source->address = reinterpret_cast<const std::byte*>(master->data());
  source->count = master->size();
  source->stored = first ? Scalar::f64 : Scalar::raw64;
  source->wanted = Scalar::raw64;
  source->owner = master;
  return source;
}

/// By name: what is called the same is the same. Masters of one rank are called "private".
inline std::uint64_t identity(const Source& source) {
  return source.name == "private" ? 0 : std::hash<std::string>()(source.name) | 1;
}

/// A master that cast() refuses to read.
inline std::atomic<std::uintptr_t> refused_begin{0}, refused_end{0};
inline void refuse(const std::vector<std::uint64_t>& master) {
  refused_begin = reinterpret_cast<std::uintptr_t>(master.data());
  refused_end = refused_begin + master.size() * 8;
}

inline void cast(void* dst, Scalar, const void* src, Scalar, std::size_t count) {
  const auto from = reinterpret_cast<std::uintptr_t>(src);
  if (from >= refused_begin && from < refused_end) throw SourceError("it cannot be read");
  std::memcpy(dst, src, count * 8);
}

/// One rank's install.
class Rank {
 public:
  Rank(std::unique_ptr<Ranks> ranks, Model of, bool always = true, std::size_t at_once = 0)
      : copies(std::make_shared<GatheredCopies>(std::move(ranks), &identity, always)),
        model(std::move(of)),
        at_once_(at_once) {
    for (std::size_t group = 0; group < model.groups.size(); ++group) {
      for (std::size_t weight = 0; weight < model.groups[group].size(); ++weight)
        sources_.push_back(
            {group, weight, source_of(model.groups[group][weight], name_of(group, weight), weight == 0)});
    }
    plan();
  }
  ~Rank() { close(); }

  /// A new engine, and the one before it closes.
  void plan(std::unique_ptr<Backend> backend = nullptr) {
    if (!backend) backend = std::make_unique<HostBackend>(&cast, 1, at_once_);
    EngineOptions options;
    options.group_bytes = 0;
    auto next = std::make_shared<Engine>(copies->around(std::move(backend)), options);
    ids_.assign(model.groups.size(), {});
    for (const Known& known : sources_)
      ids_[known.group].push_back(next->add_weight(known.source, known.group));
    next->plan();
    if (engine) engine->close();
    engine = std::move(next);
  }

  /// The first weight of the group has another master from now on.
  void replace(std::size_t group, SourcePtr source, Master master) {
    engine->update_source(ids_[group][0], source);
    model.groups[group][0] = std::move(master);
    for (Known& known : sources_)
      if (known.group == group && known.weight == 0) known.source = source;
  }

  struct Used {
    Lease lease;
    Master master;
    void check() const { EXPECT(std::memcmp(lease.data(), master->data(), master->size() * 8) == 0); }
  };
  std::vector<Used> use(std::size_t group) {
    std::vector<Used> used;
    for (std::size_t weight = 0; weight < ids_[group].size(); ++weight) {
      used.push_back({engine->acquire(ids_[group][weight], 0), model.groups[group][weight]});
      used.back().check();
    }
    return used;
  }

  void pass() {
    copies->begin_pass();
    for (std::size_t group = 0; group < model.groups.size(); ++group) use(group);
  }
  /// What a pass reads.
  std::uint64_t bytes_of_pass() {
    const std::uint64_t before = engine->stats().bytes_moved;
    pass();
    return engine->stats().bytes_moved - before;
  }

  void close() {
    copies->close();
    engine->close();
  }

  std::shared_ptr<GatheredCopies> copies;
  std::shared_ptr<Engine> engine;
  Model model;

 private:
  struct Known {
    std::size_t group, weight;
    SourcePtr source;
  };
  const std::size_t at_once_;
  std::vector<Known> sources_;
  std::vector<std::vector<WeightId>> ids_;
};

/// Runs a program on each rank, in a thread of its own. A SourceError out of it is a failure.
template <class Program>
void on_each(std::size_t ranks, const Program& program) {
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&program, rank] {
      try {
        program(rank);
      } catch (const std::exception& error) {
        fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": " + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Or until it is clear that another rank's program has failed.
template <class Holds>
void wait_until(const Holds& holds) {
  for (int left = 30000; left > 0 && !holds(); --left) std::this_thread::sleep_for(milliseconds(1));
}

inline std::shared_ptr<FakeGroup> group_of(std::size_t size, milliseconds gather = kNever,
                                           milliseconds tell = kNever) {
  return std::make_shared<FakeGroup>(size, gather, tell);
}

inline bool try_pass(Rank& rank) {
  try {
    rank.pass();
    return true;
  } catch (const SourceError&) {
    return false;
  }
}

}  // namespace dynswap::test
