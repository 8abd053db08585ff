// For threads that share an engine: masters whose every word tells which weight and which version it is, and
// a device without queues, so that each thread reads what it was handed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/engine.h"

namespace dynswap::test {

constexpr std::size_t kWords = 64;  ///< of a weight
constexpr std::size_t kWeightBytes = kWords * sizeof(std::uint32_t);

inline SourcePtr versioned_source(std::uint32_t weight, std::uint32_t version) {
  auto words = std::make_shared<std::vector<std::uint32_t>>(kWords, weight << 16 | version);
  auto source = std::make_shared<Source>();
  source->name = "weight " + std::to_string(weight);
  source->stored = source->wanted = Scalar::raw32;
  source->count = kWords;
  source->address = reinterpret_cast<const std::byte*>(words->data());
  source->owner = words;
  return source;
}

/// Whether all words are the weight's, and of one version, which is `least` or later.
inline bool holds_version(const Lease& lease, std::uint32_t weight, std::uint32_t least) {
  std::uint32_t words[kWords];
  std::memcpy(words, lease.data(), sizeof words);
  return words[0] >> 16 == weight && (words[0] & 0xffff) >= least &&
         std::all_of(words, words + kWords, [&](std::uint32_t word) { return word == words[0]; });
}

/// A copy has been made when copy() returns.
class ImmediateBackend : public Backend {
 public:
  const char* name() const noexcept override { return "immediate"; }
  const DeviceTraits& traits() const noexcept override {
    static constexpr DeviceTraits kTraits{64, 64};
    return kTraits;
  }
  Memory allocate(std::size_t bytes) override {
    return Memory(new std::byte[bytes], [](std::byte* memory) { delete[] memory; });
  }
  EventPtr copy(CopyRequest request) override {
    for (const Step& step : request.steps) {
      for (const Piece& piece : step.pieces) {
        const std::size_t element = scalar_size(piece.source->wanted);
        std::memcpy(piece.dst, piece.source->address + piece.first * element, piece.count * element);
      }
    }
    return nullptr;
  }
  void wait(Stream, const EventPtr&) override {}
  EventPtr record(Stream) override { return nullptr; }
  void close() noexcept override {}
  std::uint64_t host_synchronisations() const noexcept override { return 0; }
};

}  // namespace dynswap::test
