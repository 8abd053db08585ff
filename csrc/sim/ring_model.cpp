#include "sim/ring_model.h"

#include <algorithm>
#include <limits>

namespace dynswap::sim {

namespace {

constexpr int kWarmUp = 2;  ///< rounds until the ring is as full as it will be

}  // namespace

RingModel::RingModel(const Rhythm& rhythm) : rhythm_(rhythm) {
  for (std::size_t i = 0; i < rhythm.bytes.size(); ++i) {
    const double bytes =
        rhythm.copy_bytes.empty() ? static_cast<double>(rhythm.bytes[i]) : rhythm.copy_bytes[i];
    copy_seconds_.push_back(rhythm.latency + bytes / rhythm.bytes_per_second);
  }
}

double RingModel::seconds(const std::vector<bool>& resident, std::size_t arena_bytes) const {
  std::vector<Item> items;
  return run(resident, arena_bytes, items);
}

std::vector<double> RingModel::blame(const std::vector<bool>& resident, std::size_t arena_bytes) const {
  std::vector<Item> items;
  run(resident, arena_bytes, items);
  std::vector<double> blame(rhythm_.bytes.size(), 0);
  double waiting = 0;
  for (int round = 0; round < 2; ++round) {  // the first items travel behind the last
    for (auto item = items.rbegin(); item != items.rend(); ++item) {
      waiting += item->stalled;
      double& of_group = blame[rhythm_.steps[item->step].group];
      of_group = std::max(of_group, waiting);
      if (item->bus_was_idle) waiting = 0;
    }
  }
  return blame;
}

double RingModel::run(const std::vector<bool>& resident, std::size_t arena_bytes,
                      std::vector<Item>& items) const {
  const std::vector<Step>& steps = rhythm_.steps;
  for (std::uint32_t i = 0; i < steps.size(); ++i) {
    if (!resident[steps[i].group]) items.push_back({i});
  }
  // Uses of streamed groups are numbered through all rounds: `tail` is the oldest in the ring, `head` the
  // next to be issued, `next` the next to be used, and what is before `held` may be overwritten.
  const std::size_t count = items.size();
  const auto group_of = [&](std::size_t use) { return steps[items[use % count].step].group; };
  std::size_t tail = 0, head = 0, next = 0, held = 0;
  std::size_t used = 0;
  double now = 0, bus = 0, begin = 0;
  for (int round = 0; round <= kWarmUp; ++round) {
    if (round == kWarmUp) begin = now;
    for (std::uint32_t step = 0; step < steps.size(); ++step) {
      if (count > 0 && items[next % count].step == step) {
        while (head - next < count) {
          const std::uint32_t group = group_of(head);
          const std::size_t bytes = rhythm_.bytes[group];
          while (used + bytes > arena_bytes && tail < held) used -= rhythm_.bytes[group_of(tail++)];
          if (used + bytes > arena_bytes) break;
          Item& item = items[head++ % count];
          item.bus_was_idle = bus < now;
          bus = item.arrives = std::max(bus, now) + copy_seconds_[group];
          used += bytes;
        }
        if (head == next) return std::numeric_limits<double>::infinity();
        Item& item = items[next++ % count];
        item.stalled = std::max(0.0, item.arrives - now);
        now += item.stalled;
      }
      now += steps[step].compute_seconds;
      if (steps[step].lets_go) held = next;
    }
  }
  return now - begin;
}

}  // namespace dynswap::sim
