#include "core/by_use.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/amount.h"
#include "core/check.h"

namespace dynswap {

namespace {

struct Split {
  std::vector<std::size_t> ordered;  ///< bytes of the groups that are used in an order
  std::size_t ordered_bytes = 0;
  std::size_t by_use_bytes = 0;
  std::size_t least_ordered = 0;  ///< what is kept of those in an order, and the largest other one
  std::size_t largest_by_use = 0;
};

Split split(const std::vector<std::size_t>& bytes, const std::vector<bool>& keep,
            const std::vector<bool>& by_use) {
  Split split;
  std::size_t kept = 0, largest = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (by_use[i]) {
      split.by_use_bytes += bytes[i];
      split.largest_by_use = std::max(split.largest_by_use, bytes[i]);
      continue;
    }
    split.ordered.push_back(bytes[i]);
    split.ordered_bytes += bytes[i];
    kept += keep[i] ? bytes[i] : 0;
    largest = std::max(largest, keep[i] ? 0 : bytes[i]);
  }
  split.least_ordered = kept + largest;
  return split;
}

/// The flags of the groups that are used in an order.
std::vector<bool> ordered_of(const std::vector<bool>& flags, const std::vector<bool>& by_use) {
  std::vector<bool> ordered;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (!by_use[i]) ordered.push_back(flags[i]);
  }
  return ordered;
}

void refuse_too_small(const Split& parts, std::size_t budget) {
  const std::size_t smallest = parts.least_ordered + parts.largest_by_use;
  if (budget >= smallest) return;
  throw BudgetError("a budget of " + amount(budget) +
                        " cannot hold the largest group of weights and the largest " +
                        "expert; the smallest budget that works is " + amount(smallest),
                    smallest);
}

/// Gives the plan of the ordered groups the others' places.
PlanWithCache put_together(const ResidencyPlan& ordered, const std::vector<bool>& by_use, std::size_t cache) {
  PlanWithCache plan{ordered, cache};
  plan.residency.resident.assign(by_use.size(), false);
  for (std::size_t i = 0, at = 0; i < by_use.size(); ++i) {
    if (!by_use[i]) plan.residency.resident[i] = ordered.resident[at++];
  }
  return plan;
}

}  // namespace

void UseScore::add(double now) noexcept {
  const double at = 1 + now;
  // log2(2^a + 2^b) = b + log2(1 + 2^(a - b))
  log2_ = log2_ == 0 ? at : at + std::log2(1 + std::exp2(log2_ - at));
}

std::uint64_t UseScore::rank() const noexcept {
  constexpr double kSteps = 1u << 24;
  return static_cast<std::uint64_t>(log2_ * kSteps);
}

bool UseOrder::observe(Cursor& cursor, Group group) {
  if (cursor.current == group) return false;
  Cursor ahead = cursor;
  const std::uint32_t as_expected = advance(ahead) == group ? cursor.as_expected + 1 : 0;
  if (cursor.before) {
    auto& [latest, earlier] = followed_[*cursor.current];
    if (latest.before != cursor.before) std::swap(latest, earlier);
    if (latest.before != cursor.before)
      latest = {cursor.before, group, false};
    else
      latest = {cursor.before, group, latest.next == group};
  }
  cursor = {cursor.current, group, as_expected};
  return true;
}

bool UseOrder::is_fixed(const Cursor& cursor) noexcept {
  constexpr std::uint32_t kInARow = 8;
  return cursor.as_expected >= kInARow;
}

std::optional<UseOrder::Group> UseOrder::advance(Cursor& cursor) const {
  if (!cursor.before) return std::nullopt;
  for (const Followed& followed : followed_[*cursor.current]) {
    if (followed.before != cursor.before || !followed.twice) continue;
    cursor = {cursor.current, followed.next, cursor.as_expected};
    return followed.next;
  }
  return std::nullopt;
}

double half_life(std::size_t cache_bytes, const std::vector<std::size_t>& bytes,
                 const std::vector<bool>& by_use) {
  std::size_t total = 0, groups = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    total += by_use[i] ? bytes[i] : 0;
    groups += by_use[i] ? 1 : 0;
  }
  if (total == 0) return 1;
  const double held =
      static_cast<double>(cache_bytes) * static_cast<double>(groups) / static_cast<double>(total);
  return std::max(1.0, 2 * held);
}

PlanWithCache plan_with_cache(const std::vector<std::size_t>& bytes, const std::vector<bool>& keep,
                              const std::vector<bool>& stay, const std::vector<bool>& by_use,
                              std::size_t budget, std::uint32_t prefetch) {
  const Split parts = split(bytes, keep, by_use);
  if (parts.by_use_bytes == 0) return {plan_residency(bytes, keep, stay, budget, prefetch), 0};
  const std::size_t usual = std::min((std::size_t{prefetch} + 1) * parts.largest_by_use, parts.by_use_bytes);
  if (parts.ordered.empty()) {
    if (budget > 0) refuse_too_small(parts, budget);
    return put_together({}, by_use, budget > 0 ? std::min(budget, parts.by_use_bytes) : usual);
  }
  const std::vector<bool> kept = ordered_of(keep, by_use), staying = ordered_of(stay, by_use);
  if (budget == 0)
    return put_together(plan_residency(parts.ordered, kept, staying, 0, prefetch), by_use, usual);
  refuse_too_small(parts, budget);
  const std::size_t spare = budget - parts.least_ordered;
  std::size_t cache = std::max(parts.largest_by_use, std::min(usual, spare / 2));
  if (budget > parts.ordered_bytes) cache = std::max(cache, budget - parts.ordered_bytes);
  cache = std::min(cache, parts.by_use_bytes);
  const ResidencyPlan ordered = plan_residency(parts.ordered, kept, staying, budget - cache, prefetch);
  // What the ordered groups cannot use is the cache's too.
  const std::size_t left = budget - ordered.resident_bytes - ordered.arena_bytes;
  return put_together(ordered, by_use, std::min(left, parts.by_use_bytes));
}

PlanWithCache with_cache(const std::vector<bool>& resident, const std::vector<std::size_t>& bytes,
                         const std::vector<bool>& by_use, std::size_t cache_bytes, std::size_t budget,
                         std::uint32_t prefetch) {
  const Split parts = split(bytes, std::vector<bool>(bytes.size(), false), by_use);
  if (parts.by_use_bytes == 0) return {residency_of(resident, bytes, budget, prefetch), 0};
  const std::size_t cache = std::min(budget, std::max(cache_bytes, parts.largest_by_use));
  const ResidencyPlan ordered =
      residency_of(ordered_of(resident, by_use), parts.ordered, budget - cache, prefetch);
  const std::size_t left = budget - ordered.resident_bytes - ordered.arena_bytes;
  return put_together(ordered, by_use, std::min(left, parts.by_use_bytes));
}

}  // namespace dynswap
